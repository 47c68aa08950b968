"""Packed rows: several rows in a line one after the other, told apart by their positions, with next to no padding.

Positions start at 0 with every row, from which transformers makes a mask that keeps rows apart. A line is as wide as
the longest row of its pass: wider lines would save no padding and let attention grow with the square of the width.
"""

from collections.abc import Sequence
from typing import Any

import torch

from data.errors import UserError
from models.scoring import How, Piece, TokenRow, token_scores

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def check_packable(config: Any) -> None:
    """Raises UserError for a model with layers that carry a state from token to token, which would leak over rows."""
    other = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTION_LAYERS
    if other:
        raise UserError(
            f"rl.row_layout is 'packed', but this model has layers of kind {sorted(other)[0]!r}, through which a "
            "packed row would see the one before it; use 'padded' or 'shared'"
        )


def lines_of(lengths: Sequence[int], most: int | None = None) -> list[list[int]]:
    """Rows laid out in lines as wide as the longest of them, longest row first, each into the first line with room.

    With `most` lines no more are opened; rows that find no room are left out.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    width = max(lengths, default=0)
    lines: list[list[int]] = []
    used: list[int] = []
    for index in order:
        place = next((i for i, taken in enumerate(used) if taken + lengths[index] <= width), None)
        if place is None:
            if most is not None and len(lines) >= most:
                continue
            place = len(lines)
            lines.append([])
            used.append(0)
        lines[place].append(index)
        used[place] += lengths[index]
    return lines


def packed_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of rows in micro-batches whose lines hold at most `tokens` tokens; a longer row goes alone."""
    left = list(range(len(lengths)))
    batches: list[list[int]] = []
    while left:
        width = max(lengths[index] for index in left)
        lines = lines_of([lengths[index] for index in left], max(1, tokens // width))
        batches.append([left[place] for line in lines for place in line])
        taken = set(batches[-1])
        left = [index for index in left if index not in taken]
    return batches


def packed_rows(network: Any, rows: Sequence[TokenRow], how: How) -> list[Piece]:
    """One pass over `rows` in lines. The numbers are those of separate rows, up to rounding."""
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    lines, width = lines_of(lengths), max(lengths)
    # A pad token has position 0 wherever it stands, which makes it a row of its own: nobody sees it.
    ids_LW = torch.zeros(len(lines), width, dtype=torch.long)
    positions_LW = torch.zeros(len(lines), width, dtype=torch.long)
    flat, targets, places, columns = [], [], [], []
    for number, line in enumerate(lines):
        start = 0
        for index in line:
            row, length = rows[index], lengths[index]
            if not row.prompt_ids:
                raise ValueError(f"row {index} has no prompt: nothing predicts its first completion token")
            ids_LW[number, start : start + length] = torch.tensor([*row.prompt_ids, *row.completion_ids])
            positions_LW[number, start : start + length] = torch.arange(length)
            count = len(row.completion_ids)
            flat.append(number * width + start + len(row.prompt_ids) - 1 + torch.arange(count))
            targets.append(torch.tensor(row.completion_ids))
            places.append(torch.full((count,), index))
            columns.append(torch.arange(count))
            start += length
    device = network.device
    flat_N, targets_N, places_N, columns_N = (torch.cat(part).to(device) for part in (flat, targets, places, columns))
    scores = token_scores(
        network, ids_LW.to(device), flat_N, targets_N, how, position_ids=positions_LW.to(device), use_cache=False
    )
    return [Piece(scores, places_N, columns_N)]
