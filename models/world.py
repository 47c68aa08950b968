"""The processes that compute together: who they are, what they say to each other, and steps that all of them run.

`accelerate launch` starts them; each has a rank. Rank 0 serves the parent (models.compute), writes every file and
announces the steps that all take part in (`together`); the other ranks wait for announcements (`follow`). Values are
exchanged over gloo, so that waiting for hours holds no device; gradients go where their tensors are.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from data.progress import Report, Silent

T = TypeVar("T")
WAIT = timedelta(days=30)
"""A collective's own time limit. Ranks wait for rank 0 as long as it generates or evaluates; a lost rank ends all
(torchrun), and the request's deadline ends whatever hangs."""
BUCKET = 1 << 24
"""Gradient elements that are summed in one message (our choice: 64 MB of float32)."""


@dataclass(frozen=True)
class World:
    """The processes that compute together; one that is alone needs no launcher and exchanges nothing."""

    rank: int = 0
    size: int = 1
    sharded: bool = False
    """Whether parameters, gradients and moments are divided over the ranks (FSDP2) while a policy is trained."""
    led: bool = False
    """Whether the other ranks wait for what rank 0 announces, rather than running the same program."""
    group: Any = None
    """The group for values (gloo)."""

    @property
    def main(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return any(self.gather(flag))

    def announce(self, message: Any) -> Any:
        """Rank 0's `message`, on every rank."""
        if self.size == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def lead(self, name: str, request: Any, out: Path | None = None) -> None:
        """Tells the ranks that wait for rank 0 to run the step `name` (module:function)."""
        if self.led and self.main and self.size > 1:
            self.announce((name, request.model_dump(mode="json"), str(out)))

    def add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sums gradients over the ranks in float32, in place; a rank without one counts as 0.

        A parameter that no rank has a gradient for keeps none, so that an optimiser leaves it alone.
        """
        if self.size == 1:
            return
        present = [any(flags) for flags in zip(*self.gather([p.grad is not None for p in parameters]), strict=True)]
        bucket: list[torch.nn.Parameter] = []
        for parameter, is_there in zip(parameters, present, strict=True):
            if not is_there:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
                _add_up(bucket)
                bucket = []
            bucket.append(parameter)
        if bucket:
            _add_up(bucket)


def _add_up(bucket: Sequence[torch.nn.Parameter]) -> None:
    flat = torch.cat([parameter.grad.reshape(-1).float() for parameter in bucket])
    dist.all_reduce(flat)
    for parameter, summed in zip(bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True):
        parameter.grad.copy_(summed.view_as(parameter))


_world = World()


def world() -> World:
    """The processes that this one computes with."""
    return _world


def join(led: bool) -> World:
    """Joins the processes that `accelerate launch` started (its environment names them); alone: nothing to join."""
    global _world
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=WAIT)
        sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        _world = World(dist.get_rank(), size, sharded, led, dist.new_group(backend="gloo", timeout=WAIT))
    return _world


def leave() -> None:
    """Ends the exchange at the end of a program that all ranks run alike."""
    global _world
    if _world.size > 1:
        dist.destroy_process_group()
    _world = World()


def collective(step: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a step function that every rank must run; the same call on all of them, files are rank 0's."""

    @functools.wraps(step)
    def call(request: Any, out: Path, report: Report) -> Any:
        world().lead(f"{step.__module__}:{step.__name__}", request, out)
        value = step(request, out, report)
        world().gather(None)  # no rank goes on to read what rank 0 has not written yet
        return value

    return call


def follow() -> None:
    """Runs on the other ranks what rank 0 announces, for ever; an error is the caller's to report."""
    while True:
        name, request, out = _world.announce(None)
        module, function = name.split(":")
        step = getattr(importlib.import_module(module), function)
        request_class = next(iter(inspect.signature(step).parameters.values())).annotation
        step(request_class.model_validate(request), Path(out), Silent())


def shares(costs: Sequence[int], groups: Sequence[Any], size: int) -> list[list[int]]:
    """Positions of rows for each of `size` ranks, by cost: the heaviest goes to the lightest rank, and so on.

    Rows of a group stay together (they share a prompt) where there are at least as many groups as ranks. The same
    arguments give the same shares on every rank; a rank may get none.
    """
    units: dict[Any, list[int]] = {}
    together = len(set(groups)) >= size
    for position, group in enumerate(groups):
        units.setdefault(group if together else position, []).append(position)
    loads, found = [0] * size, [[] for _ in range(size)]
    for unit in sorted(units.values(), key=lambda unit: (-sum(costs[i] for i in unit), unit[0])):
        rank = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[rank] += sum(costs[i] for i in unit)
        found[rank] += unit
    return [sorted(share) for share in found]
