"""What an optimiser carries from one round to the next, on disk: safetensors and JSON, nothing pickled.

`optimizer.safetensors` holds AdamW's moments by parameter name, `rng.safetensors` torch's generator states,
`state.json` the counters and the states of numpy's and Python's generators.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from data.errors import UserError
from models.sharding import like, whole
from models.world import world

MOMENTS = ("exp_avg", "exp_avg_sq")
Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Counters:
    """Counts since round 0."""

    optimizer_steps: int = 0
    """Steps that moved the parameters."""
    skipped_steps: int = 0
    """Steps left out because every advantage was 0."""
    action_coefficient: float = 0.0
    """Meta-actions: the adapted coefficient of the entropy at block boundaries."""
    action_entropy: float | None = None
    """Meta-actions: that entropy in the last step."""


def save_trainer_state(folder: Path, optimizer: torch.optim.AdamW, named: Named, counters: Counters) -> None:
    """Writes everything that the next round continues from into `folder`; of several processes rank 0 does.

    Moments that are sharded over processes are written whole, so that any number of processes can continue.
    """
    tensors, adam_steps = {}, {}
    for name, parameter in named:
        state = optimizer.state.get(parameter)
        if state:
            adam_steps[name] = float(state["step"])
            found = {f"{name}.{moment}": whole(state[moment]) for moment in MOMENTS}
            tensors |= found if world().main else {}
    if not world().main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "optimizer.safetensors")
    save_file(_torch_generators(), folder / "rng.safetensors")
    state = {"counters": asdict(counters), "adam_steps": adam_steps, "rng": _other_generators()}
    (folder / "state.json").write_text(json.dumps(state, sort_keys=True) + "\n")


def load_trainer_state(folder: Path, optimizer: torch.optim.AdamW, named: Named) -> Counters:
    """Puts the state in `folder` into `optimizer` and the process's generators; returns the counters.

    Raises UserError where the state belongs to other parameters than `named`.
    """
    state = json.loads((folder / "state.json").read_text())
    tensors = load_file(folder / "optimizer.safetensors")
    known = dict(named)
    unknown = set(state["adam_steps"]) - set(known)
    if unknown:
        raise UserError(
            f"{folder} is the trainer state of other parameters ({sorted(unknown)[0]} is not trained here); "
            "continue with the settings it was made with, or start the rounds anew"
        )
    for name, steps in state["adam_steps"].items():
        parameter = known[name]
        moments = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
        if moments["exp_avg"].shape != parameter.shape:
            raise UserError(
                f"{folder}: {name} had shape {tuple(moments['exp_avg'].shape)} and has {tuple(parameter.shape)} now; "
                "continue with the settings it was made with, or start the rounds anew"
            )
        moments = {moment: like(parameter, tensor) for moment, tensor in moments.items()}
        optimizer.state[parameter] = {"step": torch.tensor(steps, dtype=torch.float32), **moments}
    _restore_generators(state["rng"], load_file(folder / "rng.safetensors"))
    return Counters(**state["counters"])


def seed_generators(seed: int) -> None:
    """Seeds torch's, numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _torch_generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _other_generators() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
    }


def _restore_generators(others: dict[str, Any], torch_states: dict[str, torch.Tensor]) -> None:
    version, numbers, gauss = others["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch_states["cpu"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(devices):
        if f"cuda:{index}" in torch_states:
            torch.cuda.set_rng_state(torch_states[f"cuda:{index}"], index)
