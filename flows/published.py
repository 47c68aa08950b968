"""The published run in numbers: R³ on all of GSM8K with Llama-2-7B, for `ratchet plan`. Imports no torch.

R³ trains on 7,473 demonstrations × 5 start states, 10 passes, one sample each, 32 rollouts an update of two epochs
(the published script). Lengths in tokens are our estimates for Llama-2's tokenizer.
"""

from dataclasses import dataclass

from flows.architectures import BYTES, Architecture
from models.settings import Parameters

DEMONSTRATIONS = 7473
STAGES = 5
PASSES = 10
ROLLOUTS_A_STEP = 32
UPDATE_EPOCHS = 2
PROMPT_TOKENS = 120
"""Instruction template and question (our estimate)."""
RESPONSE_TOKENS = 140
"""A demonstration of GSM8K with its calculator marks (our estimate)."""
FLOPS = 312e12
"""Peak of the GPU of the paper (A100) in bfloat16, a second."""
TRAINING_UTILISATION = 0.4
"""Share of the peak that an update reaches (our estimate)."""
DECODING = 1500.0
"""Generated tokens a second and GPU for 7 billion parameters with vLLM's batches of this length (our estimate)."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second and GPU, measured or given."""

    generated: float
    """Tokens that are sampled."""
    trained: float
    """Tokens of prompt and response through a forward and a backward pass."""

    @classmethod
    def estimated(cls, shape: Architecture) -> "Rates":
        """6 FLOP a parameter and trained token at TRAINING_UTILISATION of an A100; decoding bound by memory."""
        parameters = shape.parameters()
        return cls(DECODING * 6.74e9 / parameters, TRAINING_UTILISATION * FLOPS / (6 * parameters))


def mean_remaining_share(stages: int = STAGES) -> float:
    """Share of a demonstration that is still to be written, over uniform stages: 1 − mean(i / M), 0.6 for M = 5."""
    return 1 - sum(stage / stages for stage in range(stages)) / stages


@dataclass(frozen=True)
class PublishedRun:
    """Counts of the published run and of plain RL at as many rollouts."""

    shape: Architecture
    parameters: Parameters
    dtype: str

    @property
    def start_states(self) -> int:
        """Demonstrations × stages."""
        return DEMONSTRATIONS * STAGES

    @property
    def rollouts(self) -> int:
        """Sampled continuations of all passes."""
        return self.start_states * PASSES

    @property
    def optimiser_steps(self) -> int:
        """Updates of ROLLOUTS_A_STEP rollouts, UPDATE_EPOCHS times."""
        return -(-self.rollouts // ROLLOUTS_A_STEP) * UPDATE_EPOCHS

    @property
    def generated_tokens(self) -> int:
        """Rollouts × what is left of a demonstration."""
        return round(self.rollouts * RESPONSE_TOKENS * mean_remaining_share())

    @property
    def processed_tokens(self) -> int:
        """Prompt, prefix and completion of every rollout, once."""
        return self.rollouts * (PROMPT_TOKENS + RESPONSE_TOKENS)

    def hours(self, rates: Rates, gpus: int) -> float:
        """Sampling, two forward passes (old policy and reference, a third of a training pass each), two epochs."""
        sampling = self.generated_tokens / rates.generated
        training = self.processed_tokens * (UPDATE_EPOCHS + 2 / 3) / rates.trained
        return (sampling + training) / gpus / 3600

    def memory(self, gpus: int) -> list[tuple[str, float]]:
        """(part, bytes a GPU) with everything that is trained divided over the GPUs."""
        weights, trained = BYTES[self.dtype], self.shape.trained(self.parameters)
        lora = self.parameters.kind == "lora"
        rows = 4 * (PROMPT_TOKENS + RESPONSE_TOKENS)  # the published mini-batch: four rollouts a GPU
        cache_rows = ROLLOUTS_A_STEP / gpus
        length = PROMPT_TOKENS + RESPONSE_TOKENS
        return [
            ("weights to sample with", self.shape.parameters() * weights),
            ("reference weights", 0 if lora else self.shape.parameters() * weights / gpus),
            ("adapters" if lora else "trained weights, float32", trained * 4 / gpus),
            ("gradients and Adam's moments, float32", trained * 12 / gpus),
            ("activations of a mini-batch of 4", 16 * self.shape.layers * self.shape.hidden * weights * rows),
            ("key/value cache of a round", cache_rows * length * self.shape.kv_bytes_per_token(weights)),
        ]

    def rows(self, rates: Rates, measured: bool) -> list[tuple[str, str]]:
        """(quantity, figure) for the plan."""
        said = "given" if measured else "estimated, not measured"
        found = [
            ("start states", f"{DEMONSTRATIONS:,} × {STAGES} = {self.start_states:,}"),
            ("rollouts", f"{PASSES} passes: {self.rollouts:,}"),
            ("optimiser steps", f"{self.optimiser_steps:,} of {ROLLOUTS_A_STEP} rollouts, {UPDATE_EPOCHS} epochs"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("processed tokens", f"{self.processed_tokens:,} an epoch of the updates"),
            (f"tokens a second and GPU ({said})", f"{rates.generated:,.0f} sampled, {rates.trained:,.0f} trained"),
        ]
        for gpus in (1, 8, 64):
            parts = self.memory(gpus)
            total = sum(size for _, size in parts) / 1e9
            text = f"{self.hours(rates, gpus):,.1f} hours, {total:.1f} GB a GPU ("
            found.append((f"on {gpus} GPU{'s' if gpus > 1 else ''}", text + _listed(parts) + ")"))
        return found


def _listed(parts: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size)
