"""The tags as tokens of a given tokenizer, checked before anything is sampled, and block boundaries in sampled ids.

Tags are plain text: a LoRA adapter and a vLLM server need no new vocabulary. The distribution over actions is read off
at the first token at which the four opening tags differ.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import UserError
from data.meta_actions.grammar import ACTIONS, LEGAL, Action, Block, State, closing, opening

FOLLOWS = "\nabcd"
"""What stands after a tag in the check, as in training traces: tokenizers may merge a tag's end with it."""


@dataclass(frozen=True)
class Tags:
    """How a tokenizer writes the opening tags."""

    common: tuple[int, ...]
    """The ids with which all of them begin; empty where each tag has a first token of its own."""
    ids: tuple[int, ...]
    """The id after these of each of ACTIONS, all different."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The choice of one action: the sampled token that decides it."""

    column: int
    """Its place among the row's completion ids."""
    block: int
    """The block's place in the trace."""
    state: State
    action: Action

    @property
    def legal(self) -> list[bool]:
        """Which of ACTIONS may be chosen here."""
        return [action in LEGAL[self.state] for action in ACTIONS]


def read_tags(tokenizer: Any) -> Tags:
    """The tags of a tokenizer. Raises UserError where they cannot be told apart by one token.

    Every tag must begin at a token boundary, and have the same tokens up to the one that decides, whatever stands
    before it in a trace.
    """
    sequences = [_tag_tokens(tokenizer, action) for action in ACTIONS]
    common = 0
    while len({sequence[common] if common < len(sequence) else None for sequence in sequences}) == 1:
        common += 1
    deciding = [sequence[common] for sequence in sequences if common < len(sequence)]
    if len(set(deciding)) < len(ACTIONS):
        raise UserError(
            "reasoning.kind meta_actions: this tokenizer's tokens of the tags "
            f"{', '.join(map(opening, ACTIONS))} do not all differ at their token {common + 1}; use another model"
        )
    return Tags(tuple(sequences[0][:common]), tuple(deciding))


def _tag_tokens(tokenizer: Any, action: Action) -> list[int]:
    """The ids of an opening tag, the same in every context in which it may stand."""
    tag = opening(action)
    before = [state.split("_")[0] for state, actions in LEGAL.items() if action in actions]
    contexts = ["" if state == "start" else f"Abcd.\n{closing(state)}\n" for state in before]
    found: list[list[int]] = []
    for context in contexts:
        encoding = tokenizer(context + tag + FOLLOWS, add_special_tokens=False, return_offsets_mapping=True)
        places = [
            (token, start)
            for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"])
            if end > len(context) and start < len(context) + len(tag)
        ]
        if places[0][1] != len(context):
            raise UserError(
                f"reasoning.kind meta_actions: this tokenizer merges the beginning of {tag} with what stands before "
                "it, so its choice is no token of its own; use another model"
            )
        found.append([token for token, _ in places])
    if any(tokens != found[0] for tokens in found):
        raise UserError(
            f"reasoning.kind meta_actions: this tokenizer writes {tag} in different tokens after different blocks; "
            "use another model"
        )
    return found[0]


def boundaries(
    tags: Tags, blocks: Sequence[Block], ids: Sequence[int], offsets: Sequence[tuple[int, int]], prompt: int
) -> list[Boundary]:
    """The choices of the blocks that lie in the completion: `ids` with `offsets` are prefix and completion, the first
    `prompt` of them the prefix. A tag that was sampled in other tokens than the tokenizer's own is left out."""
    ends = [end for _, end in offsets]
    width = len(tags.common)
    found = []
    state: State = "start"
    for number, block in enumerate(blocks):
        first = bisect_right(ends, block.start)
        deciding = first + width
        column = deciding - prompt
        if (
            column >= 0
            and deciding < len(ids)
            and offsets[first][0] == block.start
            and tuple(ids[first:deciding]) == tags.common
            and ids[deciding] == tags.ids[ACTIONS.index(block.action)]
        ):
            found.append(Boundary(column, number, state, block.action))
        if block.action != "answer":
            state = block.state
    return found
