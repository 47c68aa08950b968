"""Packed rows: where they lie, and that no row sees another."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from models.packing import check_packable, lines_of, packed_batches, packed_rows
from models.scoring import How, TokenRow, completion_logprobs
from tests.tiny import tiny_gpt2, tiny_llama


def logprobs(model, rows):
    """By row, from packed lines."""
    [piece] = packed_rows(model, rows, How())
    return [piece.scores.logprobs_N[piece.rows_N == index] for index in range(len(rows))]


def test_lines_by_hand():
    assert lines_of([3, 5, 2, 1, 4]) == [[1], [4, 3], [0, 2]]
    assert lines_of([3, 5, 2, 1, 4], 1) == [[1]]
    assert lines_of([]) == []
    assert packed_batches([3, 5, 2, 1, 4], 10) == [[1, 4, 3], [0, 2]]
    assert packed_batches([3, 5], 1) == [[1], [0]]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=30), tokens=st.integers(1, 100))
def test_every_row_once_within_the_budget(lengths, tokens):
    batches = packed_batches(lengths, tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        lines = lines_of([lengths[index] for index in batch])
        width = max(lengths[index] for index in batch)
        assert len(lines) * width <= tokens or len(batch) == 1 or (len(lines) == 1 and width > tokens)
        assert all(sum(lengths[batch[place]] for place in line) <= width for line in lines)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_packed_is_separate_and_no_row_sees_another(make):
    model = make()
    generator = random.Random(1)
    rows = [
        TokenRow([1, *generator.choices(range(4, 100), k=prompt)], generator.choices(range(4, 100), k=completion))
        for prompt, completion in [(2, 4), (11, 9), (5, 5), (1, 2), (3, 1)]
    ]
    with torch.no_grad():
        found = logprobs(model, rows)
        for one, other in zip(found, completion_logprobs(model, rows)):
            assert torch.allclose(one, other, atol=1e-5)
        # Rows 2 and 0 share a line; another row 0 moves itself and nobody else.
        assert lines_of([7, 21, 11, 4, 5]) == [[1], [2, 0], [4, 3]]
        changed = logprobs(model, [TokenRow([1, 50, 51], [60, 61, 62, 63]), *rows[1:]])
        assert not torch.allclose(changed[0], found[0], atol=1e-3)
        for one, other in zip(changed[1:], found[1:]):
            assert torch.equal(one, other)


def test_pad_tokens_are_seen_by_nobody():
    model = tiny_llama()
    rows = [TokenRow([1, 5, 6, 7], [8, 9]), TokenRow([1, 5], [9])]
    with torch.no_grad():
        before = logprobs(model, rows)
        model.get_input_embeddings().weight[0] += 3.0  # the pad token's
        after = logprobs(model, rows)
    assert all(torch.equal(one, other) for one, other in zip(before, after))


def test_layers_that_carry_a_state_are_refused():
    config = tiny_llama().config
    check_packable(config)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        check_packable(config)


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="row 0 has no prompt"):
        packed_rows(tiny_llama(), [TokenRow([], [5])], How())
