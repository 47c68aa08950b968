"""Rounds of one cell (task, arm, seed), resumable at every point.

    url/warmup/validation/                       the warm-up policy's answers: the checkpoint before round 0
    url/rounds/0007/{rollouts,update,validation}  each published whole, with its manifest last
    url/result/                                  the checkpoint with the best validation accuracy, and all metrics

Nothing is carried from round to round but what lies in these folders, so a cell that was killed anywhere continues from
its newest complete round with the numbers of one that was not. Rounds older than `rl.keep_rounds` are pruned to their
metrics; the best checkpoint so far keeps its weights.
"""

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from data import storage
from data.artifacts import read_table, write_table
from data.progress import Report
from data.storage import ArtifactRef
from models.evaluation import evaluate
from models.requests import CellRequest, EvaluateRequest, PolicyFiles, RolloutsRequest, UpdateRequest
from models.rounds import generate
from models.trackers import Trackers
from models.update import update

METRICS = "metrics.parquet"
WARMUP = -1
"""Stands for the warm-up where a round's checkpoint is meant."""
TOLD = 4
"""Most log lines a call about outputs that are not used (a cell of other settings has hundreds)."""
STAGE_ROUNDS = 10
"""Newest rounds over which the result pools its accuracy by stage (our choice)."""


class Cell:
    """A cell's folder and how far it is. `newest` is its last complete round, -1 before round 0 is complete."""

    def __init__(self, request: CellRequest, report: Report):
        self.request = request
        self.report = report
        self.new = False
        """Whether this call made anything."""
        self.newest = WARMUP
        self.tokens = 0
        """Generated tokens of all complete rounds."""
        self.accuracies: dict[int, float] = {}
        """Round (or WARMUP) → validation accuracy of its checkpoint."""
        self._refused = 0
        self.finished = self.found(self.place("result")) is not None
        self._locate()

    def place(self, *parts: str) -> str:
        """A place in the cell's folder."""
        return storage.join(self.request.url, *parts)

    def round_place(self, number: int, part: str) -> str:
        """Where a round's rollouts, update or validation lie."""
        if number == WARMUP:
            return self.place("warmup", part)
        return self.place("rounds", f"{number:04d}", part)

    def found(self, url: str) -> ArtifactRef | None:
        """What is complete at `url` for this cell's key; damage is named in the log."""
        ref, reason = storage.find(url, self.request.key)
        if ref is None and reason != "not made yet":
            self._refused += 1
            if self._refused <= TOLD:
                self.report.log(f"not used: {reason}")
        return ref

    def whole(self, number: int, part: str) -> ArtifactRef | None:
        """A round's part with all its files; None where it is absent, damaged or pruned."""
        ref = self.found(self.round_place(number, part))
        return None if ref is None or ref.info.get("pruned") else ref

    def _locate(self) -> None:
        """Finds the newest round that can be continued from."""
        numbers = sorted((int(name) for name in storage.children(self.place("rounds")) if name.isdigit()), reverse=True)
        for number in numbers:
            done = self.whole(number, "update")
            if done is not None and self.whole(number, "rollouts") is not None:
                self.newest, self.tokens = number, done.info["generated_tokens_so_far"]
                break
        if numbers and self.newest < numbers[0] - 1:
            self.report.log(f"continues after round {self.newest}" if self.newest >= 0 else "starts again at round 0")
        for number in range(WARMUP, self.newest + 1):
            if number == WARMUP or self.due(number):
                ref = self.found(self.round_place(number, "validation"))
                if ref is not None:
                    self.accuracies[number] = ref.info["accuracy"]
        self._kept_weights = self.best() if self.accuracies else WARMUP

    @property
    def spent(self) -> bool:
        """Whether the budget of generated tokens or the limit of rounds is reached."""
        rl = self.request.rl
        return self.tokens >= rl.generated_tokens or self.newest + 1 >= rl.max_rounds

    @property
    def wants_round(self) -> bool:
        """Whether another round is to be done by this call."""
        last = self.request.last_round
        return not self.finished and not self.spent and (last is None or self.newest < last)

    def due(self, number: int) -> bool:
        """Whether the checkpoint of a complete round is to be validated."""
        return (number + 1) % self.request.rl.validate_every == 0 or (number == self.newest and self.spent)

    def weights(self, number: int) -> Path:
        """The local folder with the weights that a round's update (or the warm-up) made."""
        if number == WARMUP:
            return self.request.warmup
        return storage.fetch(self.round_place(number, "update")) / "weights"

    def policy(self, number: int) -> PolicyFiles:
        """The policy after a round's update; the warm-up for WARMUP."""
        return PolicyFiles(base=self.request.base, weights=self.weights(number))

    def shared(self, names: type) -> dict[str, Any]:
        """The fields that a step's request has in common with the cell's."""
        return {name: getattr(self.request, name) for name in names.model_fields if name in CellRequest.model_fields}

    def generate(self) -> None:
        """The rollouts of the next round, unless they lie there."""
        number = self.newest + 1
        url = self.round_place(number, "rollouts")
        if self.whole(number, "rollouts") is not None:
            return
        before = None if number == 0 else storage.fetch(self.round_place(number - 1, "rollouts")) / "curriculum.json"
        request = RolloutsRequest(
            policy=self.policy(self.newest),
            reference=self.policy(WARMUP),
            curriculum_state=before,
            round=number,
            generated_tokens_so_far=self.tokens,
            **self.shared(RolloutsRequest),
        )
        self.publish(url, generate, request)

    def update(self) -> None:
        """The update of the next round, its validation when due, and what follows from a complete round."""
        self.validate(self.newest)
        number = self.newest + 1
        self.generate()
        rollouts = self.whole(number, "rollouts")
        if rollouts is None:
            raise OSError(f"{self.round_place(number, 'rollouts')} is damaged although it was just written")
        tokens = self.tokens + rollouts.info["generated_tokens"]
        state = None if number == 0 else storage.fetch(self.round_place(number - 1, "update")) / "trainer_state"
        request = UpdateRequest(
            policy=self.policy(self.newest),
            rollouts=storage.fetch(rollouts) / "rollouts.parquet",
            trainer_state=state,
            round=number,
            generated_tokens_so_far=tokens,
            **self.shared(UpdateRequest),
        )
        self.publish(self.round_place(number, "update"), update, request, {"generated_tokens_so_far": tokens})
        self.newest, self.tokens = number, tokens
        self.show(f"round {number} complete")
        self.settle()

    def settle(self) -> None:
        """Whatever is still open after the newest complete round: validation, pruning, the result."""
        if self.finished:
            return
        self.validate(WARMUP)
        self.validate(self.newest)
        self.track()
        self.prune()
        if self.spent:
            self.finish()

    def track(self) -> None:
        """Sends the metrics of complete rounds to the trackers that are set."""
        tracking = self.request.tracking
        if not tracking.trackers:
            return
        trackers = Trackers(self.request.url, tracking, self.report)
        sections = ("rl", "curriculum", "reward", "parameters", "seed")
        settings = flat(self.request.model_dump(mode="json", include=set(sections)))
        for number in range(WARMUP, self.newest + 1):
            parts = [] if number == WARMUP else ["rollouts", "update"]
            parts += ["validation"] if number in self.accuracies else []
            trackers.send(number, [storage.fetch(self.round_place(number, p)) / METRICS for p in parts], settings)
        if self.spent:
            trackers.finish()

    def validate(self, number: int) -> None:
        """Greedy answers of a checkpoint to the validation split, where they are due and not there."""
        if number in self.accuracies or not (number == WARMUP or self.due(number)):
            return
        greedy = self.request.evaluation.model_copy(update={"temperature": 0.0, "samples": 1})
        request = EvaluateRequest(
            policy=self.policy(number),
            model="warmup" if number == WARMUP else f"round_{number}",
            split="validation",
            **self.shared(EvaluateRequest) | {"evaluation": greedy},
        )

        figures = {"round": number, "tokens": self.tokens if number == self.newest else 0}
        ref = self.publish(self.round_place(number, "validation"), partial(validation, **figures), request)
        self.accuracies[number] = ref.info["accuracy"]

    def best(self) -> int:
        """The round (or WARMUP) with the best validation accuracy; the first of equals."""
        return min(self.accuracies, key=lambda number: (-self.accuracies[number], number))

    def prune(self) -> None:
        """Leaves rounds older than `rl.keep_rounds` their metrics, and the best one its weights.

        Stops at the first round that is pruned already; at the end of the budget it looks at all.
        """
        old = range(self.newest - self.request.rl.keep_rounds, -1, -1)
        best, former = self.best(), self._kept_weights
        for number in old:
            ref, _ = storage.find(self.round_place(number, "update"), self.request.key)
            if ref is not None and ref.info.get("pruned") and number not in (best, former) and not self.spent:
                break
            self._prune_round(number, best)
        if former in old:
            self._prune_round(former, best)
        self._kept_weights = best

    def _prune_round(self, number: int, best: int) -> None:
        storage.prune(self.round_place(number, "rollouts"), [METRICS])
        storage.prune(self.round_place(number, "update"), [METRICS, "weights/"] if number == best else [METRICS])

    def finish(self) -> None:
        """Publishes the chosen checkpoint with result.json and the metrics of all rounds."""
        best = self.best()
        tables = [read_table(storage.fetch(self.round_place(WARMUP, "validation")) / METRICS, "metrics")]
        for number in range(self.newest + 1):
            for part in ("rollouts", "update", "validation"):
                url = self.round_place(number, part)
                if part == "validation" and number not in self.accuracies:
                    continue
                if self.found(url) is None:
                    raise OSError(
                        f"{url} is gone or damaged; delete {self.place('rounds')} to have all rounds made again"
                    )
                tables.append(read_table(storage.fetch(url) / METRICS, "metrics"))
        metrics = pa.concat_tables(tables)
        result = {
            "round": None if best == WARMUP else best,
            "rounds": self.newest + 1,
            "generated_tokens": self.tokens,
            "validation_accuracy": self.accuracies[best],
            "warmup_validation_accuracy": self.accuracies[WARMUP],
            "last_validation_accuracy": self.accuracies[self.newest],
            "accuracy_by_stage": accuracy_by_stage(metrics, self.newest - STAGE_ROUNDS + 1),
        }
        with storage.staging(self.place("result")) as folder:
            shutil.copytree(self.weights(best), folder / "weights")
            (folder / "result.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
            write_table(folder / METRICS, "metrics", metrics)
            newest = storage.fetch(self.round_place(self.newest, "rollouts"))
            shutil.copy(newest / "rollouts.parquet", folder)  # the report's samples
            storage.publish(folder, self.place("result"), self.request.key, result)
        self.new = self.finished = True
        chosen = "the warm-up" if best == WARMUP else f"round {best}"
        self.report.log(f"chosen: {chosen}, validation accuracy {self.accuracies[best]:.3f}, {self.tokens} tokens")

    def publish(self, url: str, step: Any, request: Any, info: dict[str, Any] | None = None) -> ArtifactRef:
        """Runs a step function into a staging folder and publishes what it made."""
        if storage.is_local(url):
            place = storage.local_path(url)
            for leftover in place.parent.glob(f".{place.name}.*"):  # of a killed process
                shutil.rmtree(leftover)
        with storage.staging(url) as folder:
            began = time.process_time()
            made = step(request, folder, _Inside(self))
            spent = {"cpu_seconds": round(time.process_time() - began, 3)}  # in the manifest: tables hold no times
            ref = storage.publish(folder, url, self.request.key, made | (info or {}) | spent)
        self.new = True
        return ref

    def show(self, text: str) -> None:
        """Reports how much of the budget is spent."""
        budget = self.request.rl.generated_tokens
        self.report.progress(min(self.tokens, budget), budget, text)

    def progress(self) -> dict[str, Any]:
        """What a call returns: whether it made anything, whether the cell is finished, and how far it is."""
        return {
            "new": self.new,
            "finished": self.finished,
            "round": None if self.newest == WARMUP else self.newest,
            "generated_tokens": self.tokens,
        }


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one table: {"rl": {"steps": 1}} → {"rl.steps": 1}; what is no number or text as text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found


class _Inside:
    """Shows a step's progress as a text beside the cell's own."""

    def __init__(self, cell: Cell):
        self.cell = cell

    def log(self, message: str) -> None:
        """Passed on."""
        self.cell.report.log(message)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """The cell's progress, with `text` and its numbers."""
        self.cell.show(f"round {self.cell.newest + 1}, {text} {done:.0f}/{total:.0f}")


def validation(request: EvaluateRequest, out: Path, report: Report, *, round: int, tokens: int) -> dict[str, Any]:
    """`evaluate`, with its figures in metrics.parquet as well."""
    figures = evaluate(request, out, report)
    shared = {"step": round + 1, "round": None if round == WARMUP else round, "generated_tokens_so_far": tokens}
    names = ("accuracy", "truncated_share", "no_answer_share")
    rows = [{"name": f"validation_{name}", "value": float(figures[name]), **shared} for name in names]
    write_table(out / METRICS, "metrics", rows)
    return figures


def accuracy_by_stage(metrics: pa.Table, first_round: int) -> dict[str, float]:
    """Stage → share of correct rollouts, pooled over the rounds from `first_round` on."""
    correct: dict[str, float] = {}
    counts: dict[str, float] = {}
    values = {
        (row["round"], row["name"]): row["value"]
        for row in metrics.to_pylist()
        if row["round"] is not None and row["round"] >= first_round and "/stage_" in row["name"]
    }
    for (number, name), share in values.items():
        if name.startswith("accuracy/stage_"):
            stage = name.removeprefix("accuracy/stage_")
            count = values[number, f"rollouts/stage_{stage}"]
            correct[stage] = correct.get(stage, 0.0) + share * count
            counts[stage] = counts.get(stage, 0.0) + count
    return {stage: correct[stage] / counts[stage] for stage in sorted(correct, key=int)}


def run_rounds(request: CellRequest, report: Report) -> dict[str, Any]:
    """Rounds until the budget of generated tokens, `rl.max_rounds` or `last_round`; continues what lies in the folder.

    Returns `Cell.progress`. At the end of the budget the folder's `result/` exists.
    """
    cell = Cell(request, report)
    while cell.wants_round:
        cell.update()
    cell.settle()
    return cell.progress()


def generate_round(request: CellRequest, report: Report) -> dict[str, Any]:
    """The rollouts of the next round, if `run_rounds` would do one; returns `Cell.progress`."""
    cell = Cell(request, report)
    if cell.wants_round:
        cell.generate()
    return cell.progress()


def update_round(request: CellRequest, report: Report) -> dict[str, Any]:
    """The update of the next round (its rollouts too, where they are not there), validation and result when due."""
    cell = Cell(request, report)
    if cell.wants_round:
        cell.update()
    cell.settle()
    return cell.progress()
