"""FSDP2: a policy's parameters, gradients and moments divided over the ranks while it is trained.

torch's `fully_shard` on every decoder layer and on the rest, as `accelerate launch` with fsdp_version 2 asks for.
Every rank must then run equally many forward and backward passes, each over whole rows (`models.updater`). What goes to
disk is whole, so that a state can be continued by any number of processes, sharded or not.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(network: Any, half: bool = False) -> None:
    """Divides the parameters of a transformers model over all ranks, in place: one unit a decoder layer, one the rest.

    With `half` they are gathered in bfloat16; gradients are summed in float32.
    FSDP_RESHARD_AFTER_FORWARD (accelerate's configuration) false keeps layers whole between forward and backward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if half:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(network.device.type, (dist.get_world_size(),))
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    for layer in network.get_decoder().layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all its parts, on the CPU; every rank must ask."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor laid out as `parameter` is: its device, its division over the ranks."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def clip_gradients(parameters: list[torch.nn.Parameter], largest: float) -> float:
    """Scales all gradients to a common norm of at most `largest`; returns the norm before."""
    parts = [[p for p in parameters if isinstance(p, DTensor)], [p for p in parameters if not isinstance(p, DTensor)]]
    if not parts[0]:
        return torch.nn.utils.clip_grad_norm_(parameters, largest).item()
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts if part]
    whole_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in whole_norms]))
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, largest, total)
    return total.item()
