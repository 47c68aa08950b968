"""What a run's processes hold in memory while they train; the formulae are explained in docs/scale.md."""

from flows.architectures import BYTES, Architecture
from flows.launch import layout
from flows.settings import RunSettings


def described(settings: RunSettings) -> str:
    """Processes, machines and how the policy lies on them."""
    found = layout(settings.compute)
    count = f"{found.processes} on {found.machines} machine{'s' if found.machines > 1 else ''}"
    if found.processes == 1:
        return count
    how = "FSDP2: parameters, gradients and moments divided" if found.sharded else "data parallel: each holds all"
    return f"{count}, {how}; started by accelerate launch with {found.config.name}"


def update_memory(shape: Architecture, settings: RunSettings, activations: float) -> dict[str, float]:
    """Bytes on each device during an update by what they are for; `activations` of a micro-batch are given.

    What is trained is kept in float32, with a gradient and two moments of Adam.
    """
    found = layout(settings.compute)
    share = found.processes if found.sharded else 1
    weight_bytes = BYTES[getattr(settings.model, "dtype", "float32")]
    full = settings.parameters.kind == "full"
    mixed = settings.compute.mixed_precision == "bf16" and weight_bytes > 2
    parameters, trained = shape.parameters(), shape.trained(settings.parameters)
    parts = {
        "weights": (trained * 4 + (0 if full else parameters * weight_bytes)) / share,
        "gradients": trained * 4 / share,
        "Adam's moments": trained * 8 / share,
        "activations": activations * (2 / weight_bytes if mixed else 1),
    }
    if found.sharded:
        # The outer unit stays whole through a pass; of the layers two are there at a time (one is fetched ahead).
        layer = sum(inputs * outputs for inputs, outputs in shape.linear_shapes().values())
        outer = parameters - shape.layers * layer
        parts["gathered units"] = (outer + 2 * layer) * (2 if mixed else weight_bytes)
        return parts
    if mixed or (full and weight_bytes == 2):
        parts["bfloat16 copies"] = parameters * 2
    if full:
        parts["the resident base"] = parameters * weight_bytes
    return parts
