"""One forward pass over rows of rollouts: what it says of their completions, however it is laid out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.critic import ValueHead
from models.packing import packed_rows
from models.policy import Policy
from models.scoring import How, Piece, TokenRow
from models.settings import VOCABULARY_CHUNK
from models.shared_prompts import shared_prompts, whole_rows
from models.vocabulary import head_weight, logit_transform


@dataclass(frozen=True)
class Scores:
    """What one forward pass says of the completions of B rows, each [B, T], padded on the right with 0."""

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor
    """Nats; with a gradient only where asked for."""
    mask_BT: torch.Tensor
    values_BT: torch.Tensor | None
    """Values of the states before each token; None without a critic."""
    actions_KA: torch.Tensor | None = None
    """Tempered logits of the tokens that decide on an action in front of K chosen tokens, row by row; see `Places`."""


@dataclass(frozen=True)
class Places:
    """Tokens of B rows at which a few logits are wanted: for each row the columns, in order, and the A ids."""

    columns: Sequence[Sequence[int]]
    ids_A: Sequence[int]


def _chosen_logits(
    network: Any, found: Sequence[Piece], places: Places, mask_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The tempered logits [K, A] of `places.ids_A` at the chosen tokens, with gradient."""
    numbers_BT = torch.full(mask_BT.shape, -1, dtype=torch.long)
    count = 0
    for row, columns in enumerate(places.columns):
        numbers_BT[row, list(columns)] = torch.arange(count, count + len(columns))
        count += len(columns)
    numbers_BT = numbers_BT.to(mask_BT.device)
    hidden, order = [], []
    for piece in found:
        numbers_N = numbers_BT[piece.rows_N, piece.columns_N]
        hidden.append(piece.scores.hidden_NH[numbers_N >= 0])
        order.append(numbers_N[numbers_N >= 0])
    hidden_KH = torch.cat(hidden)[torch.cat(order).argsort()]
    ids_A = torch.tensor(list(places.ids_A), device=hidden_KH.device)
    weight_VH, bias_V = head_weight(network.get_output_embeddings())
    bias_A = None if bias_V is None else bias_V[ids_A]
    products_KA = torch.nn.functional.linear(hidden_KH.to(weight_VH.dtype), weight_VH[ids_A], bias_A).float()
    return logit_transform(network.config).apply(products_KA) / (temperature or 1.0)


def score(
    policy: Policy,
    rows: Sequence[TokenRow],
    temperature: float,
    entropy_gradient: bool = False,
    critic: ValueHead | None = None,
    layout: str = "shared",
    vocabulary_chunk: int = VOCABULARY_CHUNK,
    places: Places | None = None,
) -> Scores:
    """Log-probabilities, entropies and values of the tempered policy; T is the longest completion of `rows`.

    `layout` and `vocabulary_chunk` are `rl.row_layout` and `rl.vocabulary_chunk`: how it is computed, not what.
    """
    how = How(temperature, "gradient" if entropy_gradient else "values", vocabulary_chunk)
    if layout == "packed":
        found = packed_rows(policy.network, rows, how)
    elif layout == "shared" and len({tuple(row.prompt_ids) for row in rows}) < len(rows):
        found = shared_prompts(policy.network, rows, how)
    else:
        found = whole_rows(policy.network, rows, how)
    spread = tuple(torch.cat([getattr(piece, name) for piece in found]) for name in ("rows_N", "columns_N"))
    lengths_B = torch.tensor([len(row.completion_ids) for row in rows], device=spread[0].device)
    mask_BT = torch.arange(int(lengths_B.max()), device=lengths_B.device) < lengths_B[:, None]
    values = [] if critic is None else [critic.values(piece.scores.hidden_NH) for piece in found]
    return Scores(
        _spread([piece.scores.logprobs_N for piece in found], spread, mask_BT),
        _spread([piece.scores.entropy_N for piece in found], spread, mask_BT),
        mask_BT,
        _spread(values, spread, mask_BT) if values else None,
        None if places is None else _chosen_logits(policy.network, found, places, mask_BT, temperature),
    )


def _spread(values: Sequence[torch.Tensor], places: tuple[torch.Tensor, ...], mask_BT: torch.Tensor) -> torch.Tensor:
    """Values of all pieces [N] laid to their rows and columns."""
    values_N = torch.cat(list(values))
    return values_N.new_zeros(mask_BT.shape).index_put(places, values_N)
