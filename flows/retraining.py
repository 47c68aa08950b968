"""The flow `retraining`: new demonstrations in, a better serving model out, or the old one kept."""

from contextlib import contextmanager
from typing import Annotated, Any

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from prefect.states import Completed
from pydantic import Field

from data import serving as store
from data import storage
from data.artifacts import stable_hash
from data.errors import UserError
from data.serving import Served
from data.storage import ArtifactRef
from flows import config, parameters
from flows.locks import run_lock
from flows.parameters import Confidence, Overrides, Preset, Questions, Seed, Tokens
from flows.pipeline import Pipeline, pieces, reasoning_of
from flows.settings import RunSettings
from tasks import display
from tasks.base import base_model
from tasks.compute import close_shared
from tasks.evaluation import evaluate
from tasks.promotion import announce, announce_nothing_new
from tasks.retraining import decide, hold_out, select_new
from tasks.steps import RunContext

LEASE_SECONDS = 60.0
"""After this long a retraining whose process was lost no longer holds up the next one (Prefect's shortest lease)."""


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    return f"retrain-{str(given.get('serving')).rstrip('/').rsplit('/', 1)[-1]}"


@flow(name="retraining", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def retraining(
    preset: Preset = "tiny",
    serving: str = "serving",
    task: str | None = None,
    demonstrations: str | None = None,
    arm: str | None = None,
    seed: Seed | None = None,
    generated_tokens: Tokens | None = None,
    promotion_questions: Questions = 200,
    minimum_new: Annotated[int, Field(ge=1)] = 1,
    confidence: Confidence = 0.95,
    overrides: Overrides | None = None,
) -> Any:
    """Trains the serving model on demonstrations that it has not seen, and promotes the result only where it is better.

    Args:
        preset: The shipped settings to start from.
        serving: Folder of the serving model, a path or any fsspec URL: its versions, and every retraining.
        task: Which expert of the settings; empty means the first. A serving folder serves one task.
        demonstrations: File of demonstrations, which may grow; empty means the expert's own source.
        arm: How the candidate is trained; empty means the last arm of the settings (r3).
        seed: Seed of everything random; empty means the setting's own (0).
        generated_tokens: Budget of the candidate in generated tokens; empty means the setting's own.
        promotion_questions: How many questions are held out, at the first retraining, to compare old and new.
        minimum_new: With fewer new demonstrations than this, nothing is done yet.
        confidence: The candidate is promoted where the paired interval of this confidence lies above 0.
        overrides: Any other setting, nested, as in a settings file; for example {"rl": {"samples": 16}}.

    Returns:
        The decision: whether the candidate was promoted, figures, reason, the serving version.
    """
    over = config.merge(overrides or {}, {"splits": {"promotion": promotion_questions}})
    settings = parameters.load(preset, over, seed=seed, generated_tokens=generated_tokens)
    settings, task, arm = chosen(settings, task, demonstrations, arm)
    serving = storage.absolute(serving)
    try:
        with one_at_a_time(serving):
            return Retraining(settings, serving, task, arm, confidence, minimum_new).run()
    finally:
        close_shared()


def chosen(
    settings: RunSettings, task: str | None, demonstrations: str | None, arm: str | None
) -> tuple[RunSettings, str, str]:
    """The settings with one expert and its source, its name, the arm. Raises UserError for names that do not exist."""
    task, arm = task or next(iter(settings.experts)), arm or list(settings.arms)[-1]
    if task not in settings.experts:
        raise UserError(f"task: there is no expert {task!r}; choose from {', '.join(settings.experts)}")
    if arm not in settings.arms:
        raise UserError(f"arm: there is no arm {arm!r}; choose from {', '.join(settings.arms)}")
    expert = settings.experts[task]
    if demonstrations is not None:
        source = expert.source.model_dump() if expert.source.kind == "file" else {"kind": "file"}
        raw = expert.model_dump() | {"source": source | {"path": storage.absolute(demonstrations)}}
        expert = type(expert).model_validate(raw)
    return settings.model_copy(update={"experts": {task: expert}}), task, arm


def serving_id(serving: str) -> str:
    """A short name of a serving folder: what its concurrency limit and its events are called."""
    return f"{serving.rstrip('/').rsplit('/', 1)[-1].lower()}-{stable_hash(serving)[:8]}"


@contextmanager
def one_at_a_time(serving: str):
    """Waits for another retraining of the same serving folder: a global concurrency limit, and a lock on a local disk.

    The limit's slot comes back when its holder's lease ends, the lock when its process ends.
    """
    log = get_run_logger()
    name = f"ratchet-{serving_id(serving)}"
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(name, 1)

    def tell(text: str) -> None:
        log.info(text)
        display.current().log("retraining", text)

    tell(f"waiting for the concurrency limit {name}")
    # a server that is lost for a while must not end a retraining: before it promotes, it looks at the pointer again
    slot = concurrency(name, occupy=1, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False)
    root, _, last = serving.rstrip("/").rpartition("/")
    with slot, run_lock(root, last, wait=True, log=tell):
        tell(f"holding the concurrency limit {name}")
        yield


class Retraining:
    """One retraining of a serving folder, in steps that are found again after an interruption."""

    def __init__(
        self, settings: RunSettings, serving: str, task: str, arm: str, confidence: float, minimum_new: int
    ) -> None:
        self.settings, self.serving, self.task, self.arm = settings, serving, task, arm
        self.confidence, self.minimum_new = confidence, minimum_new
        self.log = get_run_logger()
        self.expert = config.arm_settings(settings, task, arm)
        self.pipeline = Pipeline(settings.model_copy(update={"root": serving, "name": "lineage"}))

    def context(self, name: str) -> RunContext:
        """Where steps publish: the lineage's own folder, or that of one retraining."""
        return self.pipeline.context.model_copy(update={"name": name})

    def call(self, name: str, step: Any, *arguments: Any, **named: Any) -> ArtifactRef:
        """Calls a step that publishes below `name`."""
        self.pipeline.context = self.context(name)
        return self.pipeline.call(step, *arguments, **named)

    def run(self) -> dict[str, Any] | State:
        """Ingests, selects, trains, evaluates, decides, promotes; returns the decision."""
        self.check_lineage()
        self.complete_promotion()
        served = store.current(self.serving)
        ingested, held_out = self.ingest()
        decisions = self.decisions()
        new = self.call("intake", select_new, ingested, held_out, list(decisions.values()))
        if new.info["new"] < self.minimum_new:
            return self.nothing_new(new, served)
        base = self.base(held_out)
        name = f"retrainings/{len(decisions) + 1:04d}-{stable_hash(new.sha256, served and served.ref.sha256)[:8]}"
        self.log.info("%s: %d new demonstrations", name, new.info["new"])
        candidate = self.train(name, base, new, served)
        answers = [
            self.evaluate(name, "serving", base, (served.ref, store.WEIGHTS) if served else None, held_out),
            self.evaluate(name, "candidate", base, (candidate, "weights"), held_out),
        ]
        number = served.version if served else None
        decision = self.call(name, decide, answers[1], answers[0], new, number, self.confidence, self.settings.seed)
        now = self.promote(name, decision, candidate) if decision.info["promote"] else served
        result = decision.info | {"retraining": name, "version": now.version if now else None}
        announce(self.serving, serving_id(self.serving), result, ingested, new, base, candidate, served, now)
        return result

    def check_lineage(self) -> None:
        """Writes down what is served here, or raises UserError where something else is."""
        begun = {
            "task": self.task,
            "model": self.settings.model.model_dump(mode="json"),
            "parameters": self.settings.parameters.model_dump(mode="json"),
            "prompt": self.expert.prompt.model_dump(mode="json"),
        }
        place = storage.join(self.serving, "lineage", "settings.json")
        found = storage.read_json(place)
        if found is None:
            storage.write_json(place, begun)
            return
        other = [field for field, value in begun.items() if found.get(field) != value]
        if other:
            raise UserError(
                f"{self.serving} was begun with another {' and '.join(other)}: its models cannot be compared with or "
                "continued by this one; choose another serving folder"
            )

    def ingest(self) -> tuple[ArtifactRef, ArtifactRef]:
        """All demonstrations of the source as they are now, and the questions that are held out for good."""
        expert = self.settings.experts[self.task]
        self.pipeline.context = self.context("intake")
        ingested = self.pipeline.ingest(self.task, expert)
        held_out, _ = storage.find(storage.join(self.serving, "lineage", "held_out"))
        return ingested, held_out or self.call("lineage", hold_out, ingested)

    def base(self, held_out: ArtifactRef) -> ArtifactRef:
        """The base of all versions: made once, never on a held-out question."""
        found, _ = storage.find(storage.join(self.serving, "lineage", "base"))
        expert = self.settings.experts[self.task]
        corpus = [(expert.source, expert.prompt)] if expert.source.kind == "suite" else []
        return found or self.call(
            "lineage", base_model, self.settings.model, corpus, [held_out], self.settings.seed, pieces(self.settings)
        )

    def decisions(self) -> dict[str, ArtifactRef]:
        """Retraining → its decision, of all that have come to one."""
        names = storage.children(storage.join(self.serving, "retrainings"))
        found = {name: storage.find(storage.join(self.serving, "retrainings", name, "decision"))[0] for name in names}
        return {name: ref for name, ref in found.items() if ref is not None}

    def complete_promotion(self) -> None:
        """Promotes a candidate whose decision was interrupted before its promotion, unless the pointer has moved."""
        promoted = {served.ref.key for served in store.versions(self.serving)}
        current = store.current(self.serving)
        for name, decision in self.decisions().items():
            same = decision.info["compared_with"] == (current.version if current else None)
            if decision.info["promote"] and decision.key not in promoted and same:
                self.log.info("%s was decided but not promoted: promoting it now", name)
                cell = self.cell(f"retrainings/{name}")
                self.promote(f"retrainings/{name}", decision, cell)

    def cell(self, name: str) -> ArtifactRef:
        """The candidate of a retraining. Raises UserError where it is damaged."""
        url = self.context(name).url("experts", self.task, self.arm, str(self.settings.seed), "result")
        found, reason = storage.find(url)
        if found is None:
            raise UserError(
                f"{name} was to be promoted, but {url}: {reason}; delete its decision to have it made again"
            )
        return found

    def train(self, name: str, base: ArtifactRef, new: ArtifactRef, served: Served | None) -> ArtifactRef:
        """The candidate: warm start from the serving weights, then rounds of RL on the new demonstrations."""
        self.pipeline.context = self.context(name)
        start = (served.ref, store.WEIGHTS) if served else None
        warmup = self.pipeline.warm_up(self.task, self.expert, base, new, start)
        return self.pipeline.train(self.task, self.arm, base, warmup, new)[1]

    def evaluate(
        self, name: str, model: str, base: ArtifactRef, weights: tuple[ArtifactRef, str] | None, held_out: ArtifactRef
    ) -> ArtifactRef:
        """A model's answers to the promotion questions."""
        return self.call(
            name,
            evaluate,
            model,
            self.task,
            base,
            weights,
            held_out,
            self.expert.prompt,
            reasoning_of(self.expert, weights),
            self.expert.evaluation,
            self.settings.engine,
            self.settings.seed,
            split="promotion",
        )

    def promote(self, name: str, decision: ArtifactRef, candidate: ArtifactRef) -> Served:
        """The candidate becomes the next version. Raises UserError where another was promoted in the meantime."""
        current = store.current(self.serving)
        number = current.version if current else None
        if number != decision.info["compared_with"]:
            raise UserError(
                f"{name} was compared with version {decision.info['compared_with']}, but {number} serves by now; "
                "run the retraining again"
            )
        info = decision.info | {"retraining": name, "task": self.task, "prompt": self.expert.prompt.model_dump()}
        served = store.promote(self.serving, storage.fetch(candidate) / "weights", decision.key, info)
        self.log.info("version %d serves", served.version)
        return served

    def nothing_new(self, new: ArtifactRef, served: Served | None) -> State:
        """Ends at once, saying why."""
        counts = "{new} new of {read} demonstrations ({seen} seen before, {held_out} held out)".format(**new.info)
        message = f"nothing to train on: {counts}, at least {self.minimum_new} wanted"
        self.log.info(message)
        number = served.version if served else None
        announce_nothing_new(serving_id(self.serving), message, number)
        result = {"promote": False, "reason": message, "version": number, "retraining": None}
        return Completed(name="NothingNew", message=message, data=result)
