"""What every rollout engine does: token ids in, sampled ids with log-probabilities and a stop reason out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

StopReason = Literal["eos", "stop_string", "length", "error"]
Progress = Callable[[int, int], None]
"""Called with the number of finished rows and the number of all rows."""


@dataclass(frozen=True)
class RolloutInput:
    """One row to sample: the ids to continue, the seed of its draws, and the most tokens to sample."""

    prompt_ids: Sequence[int]
    seed: int
    max_new_tokens: int


@dataclass(frozen=True)
class RolloutOutput:
    """What was sampled: ids (a sampled EOS included), the log-probability of each, and why the row ended.

    `eos`: any of the model's EOS ids; `stop_string`: the text came to hold one; `length`: max_new_tokens were sampled;
    `error`: the model gave no finite distribution, the ids before that are kept.
    """

    completion_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


@dataclass(frozen=True)
class EngineDescription:
    """What sampled: engine and library version, weights' dtype, longest row, hash of the adapter (None: no adapter)."""

    name: str
    version: str
    dtype: str
    context: int
    adapter_hash: str | None


class RowGates(Protocol):
    """Gates of the model's layers that a row takes from its prompt (`models.loracoe.routers.SequenceGates`)."""

    def of(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Module → its gates for each prompt, [prompts, ...]. Leaves the gates off."""

    def set(self, gates: dict[str, Any] | None) -> None:
        """Module → gates of the rows of the passes to come; None: off."""


class RolloutEngine(Protocol):
    """Samples from the policy it holds. The log-probabilities are of the distribution softmax(logits / temperature);
    temperature 0 is greedy, with log-probabilities of the untempered distribution."""

    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """One output for each request, in the order of `requests`."""

    def load_adapter(self, path: Path | None) -> None:
        """Samples with the weights in `path` from now on; None: with the base."""

    def describe(self) -> EngineDescription:
        """What samples now."""
