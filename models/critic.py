"""The value head of PPO: state values on the policy's own trunk, generalised advantage estimates, the value loss.

The head is kept apart from the policy's weights (its own file in the trainer state), so that a language model is a
language model. V at a token is the value of the state before it, from the hidden state that its logits come from.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import UserError
from models.losses import kl_estimate, where
from models.settings import GeneralisedAdvantage, KLSettings

HEAD_FILE = "value_head.safetensors"
WHITENING_EPS = 1e-8


class ValueHead(torch.nn.Linear):
    """Hidden state [H] → value, float32. Starts at value 0 everywhere (our choice: no advantage is invented)."""

    def __init__(self, hidden_size: int, device: torch.device):
        super().__init__(hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def values(self, hidden_NH: Tensor) -> Tensor:
        """Values [N]."""
        return self(hidden_NH.float())[:, 0]

    def save(self, folder: Path) -> None:
        """Writes the head into a trainer state."""
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}, folder / HEAD_FILE
        )

    def restore(self, folder: Path) -> None:
        """Reads the head from a trainer state. Raises UserError where it has none."""
        if not (folder / HEAD_FILE).is_file():
            raise UserError(
                f"{folder} has no {HEAD_FILE}: these rounds were not trained with advantage.kind gae; "
                "keep their advantage, or start the rounds anew"
            )
        self.load_state_dict(load_file(folder / HEAD_FILE))


def token_rewards(
    reward: float, sampling_logprobs_C: Tensor, reference_logprobs_C: Tensor | None, kl: KLSettings
) -> Tensor:
    """Rewards [C] of one completion: the outcome on its last token, minus coefficient × KL at every token.

    No KL without reference log-probabilities. R³ uses k1, which may be negative at a token.
    """
    rewards_C = torch.zeros(len(sampling_logprobs_C))
    if reference_logprobs_C is not None:
        rewards_C -= kl.coefficient * kl_estimate(sampling_logprobs_C, reference_logprobs_C, kl.estimator)
    rewards_C[-1] += reward
    return rewards_C


def generalised_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] (Schulman et al. 2016, equation 16), 0 in masked slots.

    Masked slots are stepped over wherever they lie: neither their values nor their rewards are read, and a row ends
    with its last unmasked token (value 0 after it).
    """
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = values_BT.new_zeros(len(values_BT))
    carried_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        live_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        carried_B = torch.where(live_B, delta_B + gamma * lam * carried_B, carried_B)
        next_value_B = torch.where(live_B, values_BT[:, t], next_value_B)
        advantages_BT[:, t] = where(live_B, carried_B)
    return advantages_BT, where(mask_BT, advantages_BT + where(mask_BT, values_BT))


def whitened(advantages: Sequence[Tensor]) -> list[Tensor]:
    """Advantages of several rows with mean 0 and variance 1 over all their tokens; unchanged below two tokens."""
    every = torch.cat(list(advantages)).double() if advantages else torch.empty(0)
    if len(every) < 2:
        return list(advantages)
    mean, deviation = every.mean(), (every.var(correction=0) + WHITENING_EPS).sqrt()
    return [((row.double() - mean) / deviation).float() for row in advantages]


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(return − value) / Var(return): 1 is perfect, 0 no better than a constant; 0 where all returns agree."""
    spread = returns.double().var(correction=0)
    if spread == 0:
        return 0.0
    return (1 - (returns.double() - values.double()).var(correction=0) / spread).item()


def value_losses(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, settings: GeneralisedAdvantage
) -> tuple[Tensor, Tensor]:
    """½ squared error a token and which tokens are clipped, both [B, T].

    With `value_clip` c the worse of V and V_old + clip(V − V_old, ±c) counts (as PPO's reference code has it).
    """
    values_BT, old_BT, returns_BT = (where(mask_BT, x) for x in (values_BT, old_values_BT, returns_BT))
    error_BT = (values_BT - returns_BT).square()
    if settings.value_clip is None:
        return error_BT / 2, torch.zeros_like(mask_BT)
    bounded_BT = old_BT + (values_BT - old_BT).clamp(-settings.value_clip, settings.value_clip)
    bounded_error_BT = (bounded_BT - returns_BT).square()
    return torch.maximum(error_BT, bounded_error_BT) / 2, (bounded_error_BT > error_BT) & mask_BT
