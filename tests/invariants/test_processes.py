"""An update by two processes (gloo, `accelerate launch`) is that of one: data parallel and sharded, to 1e-5."""

import json
import random
from pathlib import Path

import pytest
import torch

from data.artifacts import read_rows
from data.progress import Silent
from models.critic import HEAD_FILE
from models.policy import Policy
from models.requests import PolicyFiles, UpdateRequest
from models.rounds import advantages_of
from models.settings import FullTraining, RLSettings
from models.update import update
from models.world import shares
from tests.distributed import Case, as_asked, update_by, weights
from tests.rl import CPU, make_adapter, rollout_rows, update_request

RATE = 0.05
REWARDS = [[1.0, 0.0, 0.3], [0.0, 1.0, 1.0], [0.3, 0.9, 0.1], [1.0, 0.2, 0.0], [0.0, 0.0, 1.0]]
"""Five groups: no two processes can have equally many rows."""
GAE = {"kind": "gae", "value_learning_rate": 0.05}
CASES = {
    "mean": {"epochs": 2},
    "clipped": {"max_gradient_norm": 0.01, "kl": {"coefficient": 0.05}, "entropy_coefficient": 0.01},
    "reinforce": {"advantage": {"kind": "global_normalisation"}, "loss": {"aggregation": "sequence_mean"}},
    "ppo": {"advantage": GAE, "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"}, "epochs": 2},
    "chunks": {"tokens_per_micro_batch": 20, "vocabulary_chunk": 48},
    "packed": {"row_layout": "packed", "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    return make_adapter(tmp_path_factory.mktemp("policy"))


def noisy(rows: list[dict], settings: dict) -> list[dict]:
    """Rows whose engine and reference log-probabilities differ from the policy's, with the advantages of `settings`."""
    generator = random.Random(2)
    for row in rows:
        for name in ("sampling_logprobs", "reference_logprobs"):
            row[name] = [value + generator.gauss(0, 0.2) for value in row[name]]
    rl = RLSettings.model_validate({"samples": 3, **settings})
    if rl.advantage.kind == "gae":
        return [row | {"advantage": None} for row in rows]
    return [row | {"advantage": value} for row, value in zip(rows, advantages_of(rows, rl))]


@pytest.fixture(scope="module")
def requests(files, tmp_path_factory) -> dict:
    """The updates: every case with LoRA, one in full, and one with fewer rows than processes."""
    folder = tmp_path_factory.mktemp("rollouts")
    base = PolicyFiles(base=files.base)
    made = {}
    for name, settings in CASES.items():
        made[name] = update_request(
            folder / name, files, noisy(rollout_rows(files, REWARDS), settings), samples=3, **settings
        )
    full = update_request(folder / "full", base, noisy(rollout_rows(base, REWARDS), {}), samples=3)
    made["full"] = full.model_copy(update={"parameters": FullTraining()})
    mixed = made["mean"].compute.model_copy(update={"mixed_precision": "bf16"})
    made["bf16"] = made["mean"].model_copy(update={"compute": mixed})
    one = [row | {"advantage": 1.0} for row in rollout_rows(files, [[1.0]])]
    made["one_row"] = update_request(folder / "one_row", files, one)
    return made


@pytest.fixture(scope="module")
def alone(requests, tmp_path_factory) -> Path:
    """The same updates by this process alone, and one with AdamW that is continued."""
    folder = tmp_path_factory.mktemp("alone")
    for name, request in requests.items():
        (folder / name).mkdir()
        with as_asked(RATE, None, 0):
            update(request, folder / name, Silent())
    (folder / "first").mkdir()
    update(requests["ppo"], folder / "first", Silent())
    (folder / "second").mkdir()
    update(continued(requests["ppo"], folder / "first"), folder / "second", Silent())
    return folder


def continued(request: UpdateRequest, made: Path) -> UpdateRequest:
    """The update of the next round after the one in `made`."""
    policy = request.policy.model_copy(update={"weights": made / "weights"})
    return request.model_copy(update={"policy": policy, "trainer_state": made / "trainer_state", "round": 1})


def figures(folder) -> dict:
    return {(row["step"], row["name"]): row["value"] for row in read_rows(folder / "metrics.parquet", "metrics")}


def equal(one: Path, other: Path) -> None:
    """The same metrics and the same weights; in bfloat16 to the rounding of its products."""
    wanted, found = figures(one), figures(other)
    assert set(wanted) == set(found)
    rough = one.name == "bf16"
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=5e-2 if rough else 1e-5, abs=5e-2 if rough else 2e-6), key
    if rough:
        assert weights(other).keys() == weights(one).keys()
        assert {tensor.dtype for tensor in weights(other).values()} == {torch.float32}
        return
    before, after = weights(one), weights(other)
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.allclose(after[name], tensor, rtol=1e-5, atol=1e-6), name
    if (one / "trainer_state" / HEAD_FILE).exists():
        from safetensors.torch import load_file

        heads = [load_file(folder / "trainer_state" / HEAD_FILE) for folder in (one, other)]
        assert heads[0]["bias"].abs() > 1e-4
        for name, tensor in heads[0].items():
            assert torch.allclose(heads[1][name], tensor, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_are_one(requests, alone, files, tmp_path, sharding):
    """Two launches in all: most of a small update is the start of its processes."""
    cases = {name: Case(request, sgd=RATE) for name, request in requests.items()}
    if sharding == "ddp":
        cases |= {f"{name}-failing": Case(requests[name], RATE, rank) for rank, name in enumerate(("chunks", "ppo"))}
    cases["first"] = Case(requests["ppo"])
    cases["second"] = Case(continued(requests["ppo"], Path("{folder}/first")))
    cases["after_one"] = Case(continued(requests["ppo"], alone / "first"))
    log = update_by(sharding, 2, cases, tmp_path)
    for name in requests:
        equal(alone / name, tmp_path / name)
    before = Policy.load(files, compute=CPU).model.named_parameters()
    moved = weights(tmp_path / "mean")
    changes = {n: (moved[n.replace(".default", "")] - p).abs().max().item() for n, p in before if "lora_B" in n}
    assert min(changes.values()) > 1e-5
    if sharding == "ddp":
        for name in ("chunks", "ppo"):
            budget = requests[name].rl.tokens_per_micro_batch // 2
            assert f"out of memory: micro-batches hold at most {budget} tokens" in log
            equal(alone / name, tmp_path / f"{name}-failing")
    states_are_whole(alone, tmp_path, requests["ppo"], tmp_path / "continued")


def states_are_whole(alone: Path, folder: Path, request: UpdateRequest, out: Path) -> None:
    """AdamW and PPO: two processes continue what one wrote, and one what two wrote, as if nothing had changed."""
    assert listed(alone / "first") == listed(folder / "first")
    out.mkdir()
    update(continued(request, folder / "first"), out, Silent())
    wanted = figures(alone / "second")
    for made in (folder / "second", folder / "after_one", out):
        assert listed(made) == listed(alone / "second")
        state = "trainer_state/state.json"
        assert json.loads((made / state).read_text()) == json.loads((alone / "second" / state).read_text())
        found = figures(made)
        assert set(found) == set(wanted)
        for step, name in found:
            if name in ("loss", "explained_variance", "value_mean"):  # AdamW turns noise into steps of 1e-3
                assert found[step, name] == pytest.approx(wanted[step, name], rel=2e-2, abs=2e-3), (made, name)


def listed(folder: Path) -> list[str]:
    """Every file below `folder`."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_mixed_precision_rounds_products_and_nothing_else(requests, alone):
    exact, rounded = figures(alone / "mean"), figures(alone / "bf16")
    assert 0 < abs(rounded[1, "gradient_norm"] / exact[1, "gradient_norm"] - 1) < 5e-2
    assert {tensor.dtype for tensor in weights(alone / "bf16").values()} == {torch.float32}


def test_shares_are_balanced_and_keep_groups_together():
    costs, groups = [5, 5, 1, 1, 1, 9], [0, 0, 1, 1, 1, 2]
    assert shares(costs, groups, 2) == [[0, 1], [2, 3, 4, 5]]
    assert shares(costs, groups, 3) == [[0, 1], [5], [2, 3, 4]]
    assert shares([3, 2], [0, 0], 4) == [[0], [1], [], []]
    assert shares([], [], 2) == [[], []]
