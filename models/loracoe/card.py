"""README.md of an exported adapter: what it is made of."""

from typing import Any

from models.loracoe.pool import Gates, Pool
from models.settings import CompositionSettings


def model_card(
    task: str, pool: Pool, gates: Gates, base_name: str, settings: CompositionSettings, figures: dict[str, Any]
) -> str:
    """The model card as Markdown with the header that model hubs read: base, where the ranks and the gates are from."""
    lines = [
        "---",
        f"base_model: {base_name}",
        "library_name: peft",
        "tags: [lora, rank-composition]",
        "---",
        "",
        f"# Adapter for {task}",
        "",
        f"A LoRA adapter composed from single ranks of {len(pool.sources)} adapters of the base `{base_name}`, and an "
        "ordinary PEFT adapter: `PeftModel.from_pretrained(base, folder)` loads it.",
        "",
        "| from adapter | SHA-256 of its weights | r | alpha | rsLoRA | ranks used | of | mean gate of these |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for source in pool.sources:
        used, held, mass = 0, 0, 0.0
        for name, module in pool.modules.items():
            for block in module.blocks:
                if block.source == source.name and name in gates:
                    own = gates[name][block.start : block.stop]
                    used, held, mass = used + int(own.count_nonzero()), held + block.rank, mass + float(own.sum())
        config = source.config
        lines.append(
            f"| {source.name} | `{source.sha256[:16]}` | {config['r']} | {config.get('lora_alpha', 8)} | "
            f"{bool(config.get('use_rslora'))} | {used} | {held} | {mass / used if used else 0:.3f} |"
        )
    lines += ["", f"Gates start from {figures['start']}; {settings.gate_steps} optimiser steps."]
    if "validation_loss" in figures:
        lines.append(
            f"Loss on held-out demonstrations {figures['validation_loss_before']:.4f} before and "
            f"{figures['validation_loss']:.4f} after; step {figures['chosen_step']} was kept."
        )
    return "\n".join(lines) + "\n"
