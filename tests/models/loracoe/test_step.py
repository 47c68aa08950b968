"""The composition step on a tiny base folder: its files, its figures, determinism."""

import json

import pytest
import torch
from peft import PeftModel

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.settings import PlainPrompt
from models.base import load_base
from models.loracoe.compose import compose_adapters
from models.loracoe.gated import GatedModel
from models.loracoe.pool import load_pool
from models.loracoe.step import compose
from models.requests import ComposeRequest
from models.settings import CompositionSettings
from tests.models.loracoe.helpers import logits, relative, write_adapter
from tests.tiny import character_tokenizer, tiny_llama

SETTINGS = CompositionSettings(importance_examples=6, gate_steps=4, batch_size=4)


def write_base(folder):
    """A base folder as models.base:prepare leaves it."""
    tiny_llama().save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    base = {"kind": "tiny", "name": "tiny", "revision": None, "dtype": "float32", "context": 64}
    (folder / "base.json").write_text(json.dumps(base))
    return folder


def write_demonstrations(path, task, count=9):
    rows = []
    for index in range(count):
        rows.append(
            {
                "task": task,
                "item_id": f"{task}-{index}",
                "question": f"{index} plus {index}?",
                "response": f"{index}+{index}={2 * index}"
                if index
                else "x" * 100,  # the first is longer than the context
                "split": "train" if index < 7 else "validation",
            }
        )
    write_table(path, "demonstrations", rows)
    return path


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    (root / "base").mkdir()
    tasks = ["sums", "logic"]
    return ComposeRequest(
        base=write_base(root / "base"),
        experts={task: write_adapter(root / task, seed) for seed, task in enumerate(tasks)},
        demonstrations={task: write_demonstrations(root / f"{task}.parquet", task) for task in tasks},
        prompts={task: PlainPrompt() for task in tasks},
        composition=SETTINGS,
        seed=3,
    )


@pytest.fixture(scope="module")
def done(request_, tmp_path_factory):
    out = tmp_path_factory.mktemp("composed")
    return out, compose(request_, out, Silent())


def test_the_files_of_a_composition(done, request_):
    out, info = done
    assert info["adapters"] == 2 and info["modules"] == 6 and info["ranks"] == 48
    pool = load_pool(out / "pool")
    assert pool.ranks == 48
    rows = read_rows(out / "importance.parquet", "importance")
    assert len(rows) == 2 * 48
    assert {row["source"] for row in rows} == {"sums", "logic"}
    assert {row["measure"] for row in rows} == {"gate_gradient_at_zeros"}
    assert {row["value"] > 0 for row in rows} == {True, False}, "signed"
    gates = json.loads((out / "gates.json").read_text())
    assert [row["gate"] for row in rows if row["task"] == "sums"] == [
        value for module in gates["sums"].values() for value in module
    ]
    names = {row["name"] for row in read_rows(out / "metrics.parquet", "metrics")}
    gradient = "gate_gradient_at_zeros"
    assert {"sums/gate_loss", "sums/gate_validation_loss", "logic/export_difference"} <= names
    assert {f"{gradient}/sums/gini", f"{gradient}/sums/mass_in_top_4", f"{gradient}/logic/share_of/sums"} <= names
    assert f"{gradient}/jaccard_of_top_4/logic/sums" in names
    for task, figures in info["tasks"].items():
        config = json.loads((out / "exported" / task / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(request_.base / "model")
        assert figures["too_long"] == 1 and figures["training_examples"] == 6
        assert figures["validation_loss"] <= figures["validation_loss_before"]
        assert figures["export_difference"] < 1e-4
        card = (out / "exported" / task / "README.md").read_text()
        assert "| sums |" in card and "| logic |" in card


def test_the_exported_adapter_is_the_gated_model(done, request_):
    out, _ = done
    gates = {name: torch.tensor(gate) for name, gate in json.loads((out / "gates.json").read_text())["logic"].items()}
    model, _ = load_base(request_.base)
    with GatedModel(model, load_pool(out / "pool")) as gated:
        gated.set_gates(gates)
        wanted = logits(gated.model)
    loaded = PeftModel.from_pretrained(load_base(request_.base)[0], out / "exported" / "logic").eval()
    assert relative(logits(loaded), wanted) < 1e-6


def test_the_same_request_writes_the_same_files(done, request_, tmp_path):
    out, info = done
    assert compose(request_, tmp_path, Silent()) == info
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_without_gate_steps_the_gates_are_importance_alone(request_, tmp_path):
    settings = SETTINGS.model_copy(update={"gate_steps": 0, "export": "pattern"})
    info = compose(request_.model_copy(update={"composition": settings}), tmp_path, Silent())
    rows = read_rows(tmp_path / "importance.parquet", "importance")
    for task, figures in info["tasks"].items():
        assert figures["start"] == "importance"
        mine = [row for row in rows if row["task"] == task]
        for module in {row["module"] for row in mine}:
            ranks = [row for row in mine if row["module"] == module]
            opened = [row["value"] for row in ranks if row["gate"]]
            helpful = sorted(row["value"] for row in ranks if row["value"] < 0)
            assert sorted(opened) == helpful[:4], "at most one adapter's mass"


def test_further_measures_stand_beside_the_first(request_, tmp_path):
    measures = ("gate_gradient_svd", "gate_fisher", "mask_count", "adalora")
    settings = SETTINGS.model_copy(update={"gate_steps": 0, "measures": measures})
    compose(request_.model_copy(update={"composition": settings}), tmp_path, Silent())
    rows = read_rows(tmp_path / "importance.parquet", "importance")
    found = list(dict.fromkeys(row["measure"] for row in rows))
    assert found[0] == "gate_gradient_at_zeros" and len(rows) == 5 * 2 * 48
    assert set(found[1:]) == {
        "gate_fisher_at_zeros",
        "mask_count_at_ones",
        "adalora_at_ones",
        "gate_gradient_at_zeros_svd_basis",
    }
    assert all((row["gate"] is None) == row["measure"].endswith("svd_basis") for row in rows)


def test_adapters_of_anyone_for_a_task_of_its_own(request_, tmp_path):
    info = compose_adapters(
        list(request_.experts.values()),
        request_.base,
        tmp_path,
        demonstrations={"mixed": request_.demonstrations["sums"]},
        composition=SETTINGS,
    )
    assert info["tasks"]["mixed"]["start"] == "importance"
    assert (tmp_path / "exported" / "mixed" / "adapter_model.safetensors").is_file()


def test_adapters_of_another_base_are_refused_unless_told_otherwise(request_, tmp_path):
    named = write_adapter(tmp_path / "named", 3)
    config = json.loads((named / "adapter_config.json").read_text()) | {"base_model_name_or_path": "org/other"}
    (named / "adapter_config.json").write_text(json.dumps(config))
    arguments = {"demonstrations": {"sums": request_.demonstrations["sums"]}, "composition": SETTINGS}
    with pytest.raises(UserError, match="names the base org/other"):
        compose_adapters([named], request_.base, tmp_path / "out", **arguments)
    assert compose_adapters([named], request_.base, tmp_path / "out", same_base=True, **arguments)["adapters"] == 1


def test_a_single_adapter_is_a_pool_of_its_own_ranks(request_, tmp_path):
    info = compose_adapters(
        {"everything": request_.experts["sums"]},
        request_.base,
        tmp_path,
        demonstrations={"sums": request_.demonstrations["sums"]},
        composition=SETTINGS,
    )
    assert info["tasks"]["sums"]["start"] == "the whole adapter"


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_a_router_is_trained_beside_the_gates(request_, tmp_path, kind):
    router = {"kind": kind, "steps": 6, "batch_size": 4, "active": 4}
    settings = CompositionSettings.model_validate(SETTINGS.model_dump() | {"router": router})
    info = compose(request_.model_copy(update={"composition": settings}), tmp_path, Silent())
    assert info["router"]["kind"] == kind and {"validation_loss/sums", "validation_loss/logic"} <= set(info["router"])
    assert (tmp_path / "router" / "router.safetensors").is_file()
    names = {row["name"] for row in read_rows(tmp_path / "metrics.parquet", "metrics")}
    assert {"router/loss", "router/validation_loss", "sums/routed_validation_loss"} <= names


def test_a_task_without_prompt_is_refused(request_, tmp_path):
    broken = request_.model_copy(update={"prompts": {}})
    with pytest.raises(UserError, match="prompts has no entry for"):
        compose(broken, tmp_path, Silent())
