"""What is refused before an engine is asked, and whether an engine's log-probabilities are the trainer's."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from data.errors import UserError
from models.policy import Policy
from models.rollout.engine import RolloutInput, RolloutOutput
from models.scoring import TokenRow
from models.tokenization import check_context

PROBE_TOKENS = 16
"""Tokens of the probe (our choice: a mean over fewer is noisy, more cost time at every delivery)."""

PROBE_SEED = 0x5EED


def check_requests(requests: Sequence[RolloutInput], temperature: float, context: int) -> None:
    """Raises UserError for a negative temperature, and for the first row that does not fit the context."""
    if temperature < 0:
        raise UserError(f"temperature is {temperature}; give 0 (greedy) or more")
    for index, request in enumerate(requests):
        if request.max_new_tokens < 1:
            raise UserError(f"row {index} asks for {request.max_new_tokens} new tokens; give 1 or more")
        check_context(request.prompt_ids, request.max_new_tokens, context, f"the prompt of row {index}")


def signed_seed(seed: int) -> int:
    """A 64-bit seed as vLLM takes it, in −2⁶³ … 2⁶³ − 1: different seeds stay different."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed


def finite_part(ids: list[int], logprobs: list[float]) -> int:
    """How many leading tokens have a log-probability: vLLM writes −9999 for one that is not finite."""
    for count, logprob in enumerate(logprobs):
        if not -9000 < logprob <= 1e-3:
            return count
    return len(ids)


def probe_request(requests: Sequence[RolloutInput], context: int) -> RolloutInput:
    """What is sampled to see that an engine has the trainer's policy: a few tokens after the first row's prompt."""
    prompt = requests[0].prompt_ids
    return RolloutInput(prompt, PROBE_SEED, min(PROBE_TOKENS, context - len(prompt)))


@dataclass(frozen=True)
class ProbeFigures:
    """Mean absolute differences of log-probabilities on a probe, nats a token."""

    trainer: float
    """Between the engine and the trainer's policy."""
    base: float | None
    """Between the engine and the base without its adapter; None: the policy is the base."""
    gap: float | None
    """Between the trainer's policy and the base: what tells them apart."""
    untempered: float
    """Between the engine and the policy at temperature 1."""


def probe_figures(policy: Policy, request: RolloutInput, output: RolloutOutput, temperature: float) -> ProbeFigures:
    """Compares an engine's log-probabilities of a probe with the policy's own."""
    row = [TokenRow(request.prompt_ids, output.completion_ids)]
    engine_C = torch.tensor(output.logprobs)

    def scored(at: float, base: bool = False) -> torch.Tensor:
        with torch.no_grad(), policy.model.disable_adapter() if base else nullcontext():
            return policy.completion_logprobs(row, at)[0].cpu()

    def mean(a_C: torch.Tensor, b_C: torch.Tensor) -> float:
        return (a_C - b_C).abs().mean().item()

    own_C = scored(temperature)
    base_C = scored(temperature, base=True) if policy.has_adapter else None
    return ProbeFigures(
        trainer=mean(engine_C, own_C),
        base=None if base_C is None else mean(engine_C, base_C),
        gap=None if base_C is None else mean(own_C, base_C),
        untempered=mean(engine_C, scored(1.0)),
    )


def tolerance(policy: Policy, wanted: float | None) -> float:
    """Largest mean difference that is still rounding (our choice: 0.1 where two libraries round to 16 bits)."""
    if wanted is not None:
        return wanted
    return 1e-3 if policy.network.dtype == torch.float32 else 0.1


def probe_problem(figures: ProbeFigures, allowed: float, temperature: float) -> str | None:
    """Why the engine does not sample from the trainer's policy; None: nothing speaks against it.

    An adapter that moves log-probabilities by less than a fifth of the tolerance cannot be told from the base.
    """
    told = figures.gap is not None and figures.gap > allowed / 5
    nearer_base = told and figures.base is not None and figures.base < figures.trainer
    if figures.trainer <= allowed and not nearer_base:
        return None
    numbers = f"mean difference of log-probabilities {figures.trainer:.2g} nats, allowed {allowed:.2g}"
    if nearer_base and figures.base is not None and figures.base <= allowed:
        return (
            f"it samples with the base although the adapter was delivered ({numbers}, from the base {figures.base:.2g})"
        )
    if temperature not in (0.0, 1.0) and figures.untempered <= allowed:
        return (
            f"its log-probabilities leave out the temperature ({numbers}); start it with "
            "--logprobs-mode processed_logprobs, as `ratchet serve` does"
        )
    return f"its log-probabilities are not the trainer's ({numbers})"
