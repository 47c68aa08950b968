"""One update by any number of processes through `accelerate launch`, with plain SGD in place of AdamW where asked.

`python -m tests.distributed` stands for `python -m models.compute` in the launched processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flows.launch import SHIPPED
from models.requests import Launch, UpdateRequest
from tasks.compute import command, loopback


def launch(sharding: str, processes: int, arguments: list[str]) -> subprocess.CompletedProcess:
    """Runs `tests.distributed` with `arguments` in `processes` processes."""
    start = command(Launch(config=SHIPPED / f"{sharding}.yaml", processes=processes))
    start[-1] = "tests.distributed"
    return subprocess.run(
        [*start, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **loopback()},
        capture_output=True,
        text=True,
        timeout=240,
    )


@dataclass(frozen=True)
class Case:
    """One update: what it is asked, and what is done to it."""

    request: UpdateRequest
    sgd: float | None = None
    """Rate of plain SGD in place of AdamW, which would turn rounding into steps as large as the rate."""
    fails: int | None = None
    """The rank whose second micro-batch runs out of memory."""


def update_by(sharding: str, processes: int, cases: dict[str, Case], folder: Path) -> str:
    """Makes every update of `cases` in one launch, in order, into `folder`/name; returns what rank 0 logged.

    In a request "{folder}" stands for `folder`: an update may continue from one before it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = [
        {"name": name, "request": case.request.model_dump(mode="json"), "sgd": case.sgd, "fails": case.fails}
        for name, case in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(listed).replace("{folder}", str(folder)))
    done = launch(sharding, processes, [str(folder)])
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What an update wrote: an adapter or full weights."""
    return {
        name: tensor
        for path in sorted((folder / "weights").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@contextmanager
def as_asked(sgd: float | None, fails: int | None, rank: int) -> Iterator[None]:
    """What a `Case` says, in this process."""
    import models.update

    class Asked(models.update.Updater):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            self.calls = 0
            if sgd is not None:
                self.optimizer = torch.optim.SGD([parameter for _, parameter in self.named], lr=sgd)

        def micro_batch_loss(self, *arguments: Any) -> torch.Tensor:
            self.calls += 1
            if rank == fails and self.calls == 2:
                raise torch.OutOfMemoryError("planned")
            return super().micro_batch_loss(*arguments)

    kept = models.update.Updater, models.update.save_trainer_state
    models.update.Updater = Asked
    if sgd is not None:
        models.update.save_trainer_state = lambda folder, *_: folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        models.update.Updater, models.update.save_trainer_state = kept


def main(folder: Path) -> None:
    """Every update that `folder`/cases.json names, by all ranks."""
    from models.compute import TerminalReport
    from models.update import update
    from models.world import join, leave

    here = join(led=False)
    for case in json.loads((folder / "cases.json").read_text()):
        out = folder / case["name"]
        out.mkdir(exist_ok=True)
        with as_asked(case["sgd"], case["fails"], here.rank):
            update(UpdateRequest.model_validate(case["request"]), out, TerminalReport())
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
