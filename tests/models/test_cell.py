"""A cell's rounds: resumed anywhere with the same numbers, chosen on validation, pruned, repaired."""

import json
import random
from pathlib import Path

import pytest

from data import storage
from data.artifacts import file_hash, read_rows, stable_hash
from data.progress import Silent
from data.settings import MixedCurriculum, PlainPrompt, RewardSettings
from models import cell as cell_module
from models.cell import Cell, accuracy_by_stage, generate_round, run_rounds, update_round
from models.policy import Policy
from models.requests import CellRequest
from models.settings import EvaluationSettings, RLSettings, TransformersEngine
from tests.rl import CPU, LORA, make_base, write_questions, write_start_states

ROUNDS = 5


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("inputs")
    base = make_base(folder / "base")
    Policy.load(base, LORA, CPU, trainable=True, seed=3).save(folder / "warmup")
    return {
        "base": base.base,
        "warmup": folder / "warmup",
        "start_states": write_start_states(folder / "start_states.parquet"),
        "questions": write_questions(folder / "questions.parquet"),
    }


def request_for(inputs: dict, url: Path, key: str = "key", last_round: int | None = None, **rl) -> CellRequest:
    settings = {
        "prompts": 4,
        "samples": 3,
        "steps": 2,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
        "max_rounds": ROUNDS,
        "validate_every": 2,
        **rl,
    }
    return CellRequest(
        url=str(url),
        key=key,
        parameters=LORA,
        prompt=PlainPrompt(),
        curriculum=MixedCurriculum(n_stages=3),
        reward=RewardSettings(functions=("tests.rl:early_letters",)),
        rl=RLSettings.model_validate(settings),
        evaluation=EvaluationSettings(max_new_tokens=4),
        engine=TransformersEngine(),
        last_round=last_round,
        seed=7,
        compute=CPU,
        **inputs,
    )


def contents(url: Path) -> dict[str, str]:
    """Hash of every file of a cell; of a manifest, what it says besides the CPU seconds that its step took."""
    found = {}
    for path in sorted(url.rglob("*")):
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            manifest["info"].pop("cpu_seconds", None)
            found[path.relative_to(url).as_posix()] = stable_hash(manifest)
        elif path.is_file():
            found[path.relative_to(url).as_posix()] = file_hash(path)
    return found


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory) -> Path:
    """A cell that was never interrupted."""
    url = tmp_path_factory.mktemp("straight") / "cell"
    progress = run_rounds(request_for(inputs, url), Silent())
    assert progress["finished"]
    assert progress["round"] == ROUNDS - 1
    return url


class Lines(Silent):
    """Keeps the log."""

    def __init__(self):
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def test_what_a_finished_cell_holds(straight):
    result = json.loads((straight / "result/result.json").read_text())
    assert result["rounds"] == ROUNDS
    assert result["generated_tokens"] > 0
    assert set(result["accuracy_by_stage"]) == {"0", "1", "2"}
    assert (straight / "result/weights/adapter_model.safetensors").is_file()
    metrics = read_rows(straight / "result/metrics.parquet", "metrics")
    by_name: dict[str, list] = {}
    for row in metrics:
        by_name.setdefault(row["name"], []).append(row)
    assert [row["round"] for row in by_name["reward"]] == list(range(ROUNDS))
    assert [row["step"] for row in by_name["gradient_norm"]] == list(range(1, 2 * ROUNDS + 1))
    # The warm-up, every second round, and the last.
    assert [row["round"] for row in by_name["validation_accuracy"]] == [None, 1, 3, 4]
    tokens = [row["generated_tokens_so_far"] for row in by_name["reward"]]
    assert tokens == sorted(tokens)
    assert tokens[-1] == result["generated_tokens"]
    assert by_name["validation_accuracy"][1]["generated_tokens_so_far"] == tokens[1]


def test_training_moves_the_policy(straight, inputs):
    rows = read_rows(straight / "rounds/0004/rollouts/rollouts.parquet", "rollouts")
    assert {row["policy_version"] for row in rows} == {4}
    weights = {straight / f"rounds/000{number}/update/weights/adapter_model.safetensors" for number in (3, 4)}
    assert len({file_hash(path) for path in weights}) == 2


def test_old_rounds_are_pruned_to_their_metrics(straight):
    for number in range(ROUNDS):
        held = {path.name for path in (straight / f"rounds/{number:04d}").rglob("*") if path.is_file()}
        assert ("rollouts.parquet" in held) == (number >= ROUNDS - 2)
        assert ("optimizer.safetensors" in held) == (number >= ROUNDS - 2)
        assert "metrics.parquet" in held
    assert not list(straight.rglob(".*part*"))


def test_a_finished_cell_is_not_done_again(straight, inputs, monkeypatch):
    before = contents(straight)
    monkeypatch.setattr(cell_module, "generate", None)
    monkeypatch.setattr(cell_module, "update", None)
    for function in (run_rounds, generate_round, update_round):
        for last in (None, 0, 3):
            progress = function(request_for(inputs, straight, last_round=last), Silent())
            assert (progress["new"], progress["finished"]) == (False, True)
    assert contents(straight) == before


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_and_resumed_is_the_same(straight, inputs, tmp_path, monkeypatch, seed):
    """Kills before, within and after what is published, many times in a run; then all files are equal, bit by bit."""
    generator = random.Random(seed)
    url = tmp_path / "cell"
    publish, prune, kills = storage.publish, storage.prune, 0

    def dying(function, before, after):
        def call(*arguments, **keywords):
            nonlocal kills
            moment = generator.random()
            if kills < 12 and moment < before:
                kills += 1
                raise Killed
            value = function(*arguments, **keywords)
            if kills < 12 and moment > 1 - after:
                kills += 1
                raise Killed
            return value

        return call

    monkeypatch.setattr(storage, "publish", dying(publish, 0.2, 0.2))
    monkeypatch.setattr(storage, "prune", dying(prune, 0.1, 0.1))
    for _ in range(100):
        try:
            progress = run_rounds(request_for(inputs, url), Silent())
        except Killed:
            random.seed(generator.random())
            continue
        break
    assert kills >= 5
    assert progress["finished"]
    assert contents(url) == contents(straight)


@pytest.mark.parametrize("rounds_per_task", [1, 2, 3])
def test_how_many_rounds_a_task_covers_changes_nothing(straight, inputs, tmp_path, rounds_per_task):
    url = tmp_path / "cell"
    first = 0
    while True:
        request = request_for(inputs, url, last_round=first + rounds_per_task - 1)
        progress = run_rounds(request, Silent())
        assert progress["new"]
        first += rounds_per_task
        if progress["finished"]:
            break
        assert progress["round"] == first - 1
        assert not run_rounds(request, Silent())["new"]
    assert contents(url) == contents(straight)


def test_rollouts_and_updates_as_tasks_of_their_own(straight, inputs, tmp_path):
    url = tmp_path / "cell"
    for number in range(ROUNDS):
        request = request_for(inputs, url, last_round=number)
        assert generate_round(request, Silent())["new"]
        assert not generate_round(request, Silent())["new"]
        assert (url / f"rounds/{number:04d}/rollouts/rollouts.parquet").is_file()
        progress = update_round(request, Silent())
        assert progress["new"]
        assert progress["finished"] == (number == ROUNDS - 1)
        # A flow that is run again asks for the rounds from the first one on.
        for earlier in range(number + 1):
            assert not generate_round(request_for(inputs, url, last_round=earlier), Silent())["new"]
    assert contents(url) == contents(straight)


@pytest.mark.parametrize(
    "damaged",
    ["update/weights/adapter_model.safetensors", "update/trainer_state/state.json", "rollouts/curriculum.json"],
)
@pytest.mark.parametrize("damage", [lambda b: b[:-1] + b"#", lambda b: b[: len(b) // 2]], ids=["changed", "truncated"])
def test_a_damaged_newest_round_is_named_and_made_again(straight, inputs, tmp_path, damaged, damage):
    url = tmp_path / "cell"
    run_rounds(request_for(inputs, url, last_round=3), Silent())
    path = url / "rounds/0003" / damaged
    path.write_bytes(damage(path.read_bytes()))
    report = Lines()
    progress = run_rounds(request_for(inputs, url), report)
    assert any(str(path) in line and "hash" in line for line in report.lines)
    assert progress["finished"]
    assert contents(url) == contents(straight)


def test_without_any_round_to_continue_from_the_cell_starts_again(inputs, tmp_path):
    urls = [tmp_path / "whole", tmp_path / "damaged"]
    run_rounds(request_for(inputs, urls[0], keep_rounds=1), Silent())
    run_rounds(request_for(inputs, urls[1], keep_rounds=1, last_round=3), Silent())
    (urls[1] / "rounds/0003/update/trainer_state/state.json").unlink()
    report = Lines()
    run_rounds(request_for(inputs, urls[1], keep_rounds=1), report)
    assert any("missing" in line for line in report.lines)
    assert any("round 0" in line for line in report.lines)
    assert contents(urls[0]) == contents(urls[1])


def test_rounds_of_other_settings_are_not_continued(straight, inputs, tmp_path):
    url = tmp_path / "cell"
    run_rounds(request_for(inputs, url, key="other", learning_rate=1e-3), Silent())
    report = Lines()
    run_rounds(request_for(inputs, url), report)
    assert any("other settings" in line for line in report.lines)
    assert contents(url) == contents(straight)


def test_a_cell_in_an_object_store(straight, inputs, tmp_path, monkeypatch):
    """The same files under a URL that is no local folder, with rollouts and updates as tasks of their own."""
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/cell"
    for number in range(ROUNDS):
        request = request_for(inputs, tmp_path, last_round=number).model_copy(update={"url": url})
        generate_round(request, Silent())
        progress = update_round(request, Silent())
    assert progress["finished"]
    result = storage.fetch(f"{url}/result")
    for name in ("metrics.parquet", "result.json", "weights/adapter_model.safetensors"):
        assert file_hash(result / name) == file_hash(straight / "result" / name)
    kept = storage.read_json(f"{url}/rounds/0000/update/manifest.json")
    assert set(kept["files"]) == {"metrics.parquet"}


def test_what_a_killed_process_left_is_removed(inputs, tmp_path):
    url = tmp_path / "cell"
    leftover = url / "rounds/0000/.rollouts.part-abc"
    leftover.mkdir(parents=True)
    (leftover / "rollouts.parquet").write_bytes(b"half")
    run_rounds(request_for(inputs, url, last_round=0), Silent())
    assert not list(url.rglob(".*"))


def scripted(monkeypatch, accuracies: dict[str, float]) -> None:
    """Validation answers by script: accuracy by the name of what is validated."""

    def evaluate(request, out, report):
        (out / "evaluations.parquet").write_bytes(b"")
        return {"accuracy": accuracies[request.model], "truncated_share": 0.0, "no_answer_share": 0.0}

    monkeypatch.setattr(cell_module, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ([0.1, 0.5, 0.3, 0.4], 1),
        ([0.1, 0.2, 0.3, 0.4], 4),
        ([0.6, 0.5, 0.3, 0.4], None),
        ([0.5, 0.5, 0.5, 0.5], None),
        ([0.1, 0.2, 0.4, 0.4], 3),
    ],
)
def test_the_best_checkpoint_survives_and_is_the_result(straight, inputs, tmp_path, monkeypatch, accuracies, chosen):
    url = tmp_path / "cell"
    scripted(monkeypatch, dict(zip(["warmup", "round_1", "round_3", "round_4"], accuracies)))
    run_rounds(request_for(inputs, url, keep_rounds=1), Silent())
    result = json.loads((url / "result/result.json").read_text())
    assert result["round"] == chosen
    assert result["validation_accuracy"] == max(accuracies)
    assert result["warmup_validation_accuracy"] == accuracies[0]
    assert result["last_validation_accuracy"] == accuracies[-1]
    source = inputs["warmup"] if chosen is None else url / f"rounds/{chosen:04d}/update/weights"
    name = "adapter_model.safetensors"
    assert file_hash(url / "result/weights" / name) == file_hash(source / name)
    kept = {int(path.parts[-4]) for path in url.glob(f"rounds/*/update/weights/{name}")}
    assert kept == {4} | ({chosen} if chosen is not None else set())


def test_the_budget_ends_the_cell(inputs, tmp_path):
    request = request_for(inputs, tmp_path / "cell", max_rounds=100, generated_tokens=150)
    progress = run_rounds(request, Silent())
    assert progress["finished"]
    assert progress["generated_tokens"] >= 150
    rollouts = read_rows(tmp_path / f"cell/rounds/{progress['round']:04d}/rollouts/rollouts.parquet", "rollouts")
    assert progress["generated_tokens"] - sum(len(row["completion_ids"]) for row in rollouts) < 150


def test_progress_is_told_in_tokens(inputs, tmp_path):
    seen = []

    class Watching(Silent):
        def progress(self, done, total, text=""):
            seen.append((done, total, text))

    run_rounds(request_for(inputs, tmp_path / "cell", max_rounds=1, generated_tokens=1000), Watching())
    assert all(total == 1000 for _, total, _ in seen)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert any("rollouts" in text for _, _, text in seen)


def test_nothing_new_before_the_first_round(inputs, tmp_path):
    cell = Cell(request_for(inputs, tmp_path / "cell"), Silent())
    assert cell.progress() == {"new": False, "finished": False, "round": None, "generated_tokens": 0}


def test_accuracy_by_stage_pools_rollouts_not_rounds():
    import pyarrow as pa

    rows = [
        {"round": number, "name": name, "value": value}
        for number, values in [(0, (1.0, 9)), (1, (1.0, 1)), (2, (0.0, 3))]
        for name, value in zip(("accuracy/stage_2", "rollouts/stage_2"), values)
    ]
    assert accuracy_by_stage(pa.Table.from_pylist(rows), 1) == {"2": 0.25}
