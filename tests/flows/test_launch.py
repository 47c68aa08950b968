"""Processes of a run: which configuration, what is refused, what the plan says of memory."""

import pytest

from data.errors import UserError
from flows import config, preflight
from flows.architectures import Architecture
from flows.launch import SHIPPED, layout
from flows.scale import described, update_memory
from flows.settings import ComputeSettings
from models.requests import BaseRequest

TOY = Architecture(10, 2, 1, 1, 10, 20, 100, True)


def test_one_process_needs_no_launcher():
    assert layout(ComputeSettings()).launch is None
    found = layout(ComputeSettings(processes=4, sharding="fsdp2"))
    assert (found.processes, found.sharded, found.launch.config) == (4, True, SHIPPED / "fsdp2.yaml")


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_shipped_files_are_what_accelerate_reads(name):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(SHIPPED / f"{name}.yaml"))
    assert loaded.distributed_type.value == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
    own = layout(ComputeSettings(accelerate_config=str(SHIPPED / f"{name}.yaml")))
    assert (own.processes, own.machines, own.sharded) == (2, 1, name == "fsdp2")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        ("a: [", "is no YAML"),
        ("just text", "holds no settings"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2", "use MULTI_GPU or FSDP"),
        ("distributed_type: FSDP\nnum_processes: 2", "set fsdp_config.fsdp_version to 2"),
        ("distributed_type: MULTI_GPU\nnum_processes: 1", "at least 2"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nmachine_rank: 1\nnum_machines: 2", "machine of rank 0"),
    ],
)
def test_a_file_of_ones_own_is_looked_at_before_the_run(tmp_path, text, reason):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    settings = config.load("tiny", {"compute": {"accelerate_config": str(path)}})
    with pytest.raises(UserError, match=rf"(?s)compute\.accelerate_config.*{reason}"):
        preflight.check(settings)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        ({"sharding": "fsdp2"}, "nothing to divide"),
        ({"processes": 0}, "processes"),
        ({"processes": 2, "accelerate_config": "x.yaml"}, "leave out"),
    ],
)
def test_settings_that_contradict_each_other(compute, reason):
    with pytest.raises(UserError, match=reason):
        config.load("tiny", {"compute": compute})


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    settings = config.load("tiny", {"tracking": {"trackers": ["mlflow"]}})
    with pytest.raises(UserError, match="mlflow is not installed; run `pip install mlflow-skinny`"):
        preflight.check(settings)


def test_trackers_write_to_a_local_folder():
    settings = config.load("tiny", {"root": "memory://runs", "tracking": {"trackers": ["tensorboard"]}})
    with pytest.raises(UserError, match=r"set tracking\.folder"):
        preflight.check(settings)


def test_memory_by_hand():
    """TOY: a layer has 4·100 + 3·200 = 1000 weights and 20 of norms, 2 of them, 1000 of embeddings, 10 of a norm."""
    assert TOY.parameters() == 3050
    full = {"parameters": {"kind": "full"}, "composition": {"enabled": False}}
    settings = config.load("tiny", full | {"compute": {"processes": 5, "sharding": "fsdp2"}})
    assert update_memory(TOY, settings, 7.0) == {
        "weights": 2440,
        "gradients": 2440,
        "Adam's moments": 4880,
        "activations": 7,
        "gathered units": (1050 + 2000) * 4,
    }
    assert "5 on 1 machine, FSDP2" in described(settings)
    settings = config.load("tiny", full | {"compute": {"processes": 5, "mixed_precision": "bf16"}})
    memory = update_memory(TOY, settings, 8.0)
    assert memory["weights"] == memory["gradients"] == memory["the resident base"] == 12200
    assert (memory["bfloat16 copies"], memory["activations"]) == (6100, 4)
    lora = config.load("tiny", {"parameters": {"rank": 1}})
    adapter = 2 * (4 * 20 + 3 * 30)
    assert update_memory(TOY, lora, 0)["Adam's moments"] == 8 * adapter
    half = config.load("llama2-7b")
    assert update_memory(TOY, half, 8.0) == {
        "weights": 3050 * 4 / 8,
        "gradients": 3050 * 4 / 8,
        "Adam's moments": 3050,
        "activations": 8,
        "gathered units": (1050 + 2000) * 2,
    }


def test_a_run_hands_its_processes_to_every_task(tmp_path):
    from flows.pipeline import Pipeline
    from tasks.steps import Inputs, step_key

    settings = {"root": str(tmp_path), "compute": {"processes": 3, "sharding": "fsdp2", "device": "cpu"}}
    context = Pipeline(config.load("tiny", settings)).context
    assert (context.launch.processes, context.launch.config.name) == (3, "fsdp2.yaml")
    assert Pipeline(config.load("tiny", {"root": str(tmp_path)})).context.launch is None

    def key(**compute):
        found = Pipeline(config.load("tiny", {"root": str(tmp_path), "compute": compute})).context.compute
        request = BaseRequest(model=config.load("tiny").model, compute=found)
        return step_key("models.base:prepare", 1, request, Inputs())

    assert key() == key(processes=3, sharding="fsdp2") != key(mixed_precision="bf16")
