"""Distributions over the legal actions at block boundaries: log-probabilities, entropy, KL, and their term in the loss.

K boundaries, 4 actions in the order of ACTIONS. π̃(a|s) is the policy's probability of the deciding token of tag a,
divided by the sum over the actions that are legal in s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.settings import ActionRegularisation
from models.meta_actions.tags import Boundary, Tags
from models.scoring import TokenRow, logits_at, micro_batches


@dataclass(frozen=True)
class RowBoundaries:
    """The boundaries of one row that the update looks at: those with more than one legal action."""

    columns_K: list[int]
    legal_K4: Tensor
    reference_K4: Tensor | None
    """Log-probabilities of the warm-up policy; None without a KL term."""


def legal_logprobs(logits_K4: Tensor, legal_K4: Tensor) -> Tensor:
    """log π̃ of each action [K, 4]; 0 where an action is not legal (its probability is 0: see `entropy`)."""
    masked_K4 = logits_K4.masked_fill(~legal_K4, -torch.inf)
    return torch.where(legal_K4, masked_K4.log_softmax(-1), 0.0)


def entropy(logprobs_K4: Tensor, legal_K4: Tensor) -> Tensor:
    """H(π̃) / log(number of legal actions) [K], between 0 and 1; give boundaries with at least two legal actions."""
    probabilities_K4 = torch.where(legal_K4, logprobs_K4.exp(), 0.0)
    return -(probabilities_K4 * logprobs_K4).sum(-1) / legal_K4.sum(-1).log()


def divergence(logprobs_K4: Tensor, reference_K4: Tensor, legal_K4: Tensor) -> Tensor:
    """KL(π̃ ‖ reference) [K] in nats, exact over the legal actions."""
    probabilities_K4 = torch.where(legal_K4, logprobs_K4.exp(), 0.0)
    return (probabilities_K4 * (logprobs_K4 - reference_K4)).sum(-1)


@torch.no_grad()
def action_logprobs(
    network: Any,
    rows: Sequence[TokenRow],
    boundaries: Sequence[Sequence[Boundary]],
    tags: Tags,
    temperature: float,
    tokens_per_micro_batch: int,
) -> list[list[list[float]]]:
    """log π̃ at every boundary of every row, [row][boundary][action]; logits exist for boundaries alone."""
    result: list[list[list[float]]] = [[] for _ in rows]
    busy = [i for i, found in enumerate(boundaries) if found]
    lengths = [len(rows[i].prompt_ids) + len(rows[i].completion_ids) for i in busy]
    device = network.device
    tag_ids = torch.tensor(tags.ids, device=device)
    for batch in micro_batches(lengths, tokens_per_micro_batch):
        chosen = [busy[index] for index in batch]
        sequences = [torch.tensor([*rows[i].prompt_ids, *rows[i].completion_ids]) for i in chosen]
        ids_BT = pad_sequence(sequences, batch_first=True)
        flat = [
            place * ids_BT.shape[1] + len(rows[i].prompt_ids) + boundary.column - 1
            for place, i in enumerate(chosen)
            for boundary in boundaries[i]
        ]
        legal_K4 = torch.tensor([boundary.legal for i in chosen for boundary in boundaries[i]], device=device)
        logits_KV = logits_at(network, ids_BT.to(device), torch.tensor(flat, device=device)).float()
        logprobs_K4 = legal_logprobs(logits_KV[:, tag_ids] / temperature, legal_K4)
        for i, found in zip(chosen, logprobs_K4.cpu().split([len(boundaries[i]) for i in chosen]), strict=True):
            result[i] = found.tolist()
    return result


class ActionTerm:
    """α · entropy bonus and β · KL of the action distribution, with a coefficient α that adapts to a target.

    α rises by `entropy_step` after a step whose mean entropy is below the target and falls above it, within
    [0, `entropy_coefficient`]; it is applied only while the last measured entropy is at or below the target (the rule
    of Skywork-OR1, there for the entropy of all tokens).
    """

    def __init__(self, settings: ActionRegularisation, tags: Tags, coefficient: float, last: float | None) -> None:
        self.settings = settings
        self.tags = tags
        self.coefficient = coefficient
        self.last = last
        """Mean entropy of the step before; None before the first."""

    @property
    def applied(self) -> float:
        """α of the next step."""
        below = self.last is not None and self.last <= self.settings.entropy_target
        return self.coefficient if below else 0.0

    def loss(self, logits_K4: Tensor, legal_K4: Tensor, reference_K4: Tensor | None, total: int) -> tuple[Tensor, ...]:
        """The term's part of the loss for K of the `total` boundaries of a step, and Σ entropy and Σ KL, detached."""
        logprobs_K4 = legal_logprobs(logits_K4, legal_K4)
        entropies_K = entropy(logprobs_K4, legal_K4)
        loss = -self.applied * entropies_K.sum() / total
        kl = logits_K4.new_zeros(())
        if reference_K4 is not None:
            kl = divergence(logprobs_K4, reference_K4, legal_K4).sum()
            loss = loss + self.settings.kl_coefficient * kl / total
        return loss, entropies_K.detach().sum(), kl.detach()

    def adapt(self, mean_entropy: float) -> None:
        """Takes note of a step's mean entropy."""
        if math.isnan(mean_entropy):
            return
        up = mean_entropy < self.settings.entropy_target
        change = self.settings.entropy_step if up else -self.settings.entropy_step
        self.coefficient = min(max(self.coefficient + change, 0.0), self.settings.entropy_coefficient)
        self.last = mean_entropy


def is_regularised(settings: ActionRegularisation) -> bool:
    """Whether the loss has a term of the action distribution."""
    return settings.entropy_coefficient > 0 or settings.kl_coefficient > 0
