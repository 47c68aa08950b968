"""Which processor a step computes on."""

import os

import torch

from data.errors import UserError
from models.requests import Device
from models.world import world


def select_device(compute: Device) -> torch.device:
    """The torch device of `compute`, after setting its number of threads for this process.

    `auto` is CUDA where there is one, the CPU otherwise. Raises UserError for a device that is not there.
    """
    if compute.threads is not None:
        if compute.threads < 1:
            raise UserError(f"compute.threads is {compute.threads}; give 1 or more, or leave it out")
        torch.set_num_threads(compute.threads)
    if compute.device == "auto":
        return _own(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(compute.device)
    except RuntimeError as error:
        raise UserError(
            f"compute.device {compute.device!r} is no torch device ({error}); use auto, cpu or cuda"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("compute.device is cuda, but torch finds no CUDA device; use auto or cpu")
    return _own(device)


def gpus() -> list[tuple[str, int, int]]:
    """(name, free bytes, bytes) of every GPU that this torch can use."""
    if not torch.cuda.is_available():
        return []
    return [
        (torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(torch.cuda.device_count())
    ]


def _own(device: torch.device) -> torch.device:
    """Of several processes on a machine each takes the CUDA device of its local rank."""
    if device.type != "cuda" or device.index is not None or world().size == 1:
        return device
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise UserError(
            f"process {rank} of this machine has no CUDA device: there are {count}; lower compute.processes to "
            f"{count}, or set compute.device cpu"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
