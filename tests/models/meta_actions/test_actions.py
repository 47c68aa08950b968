"""The distribution over legal actions: by hand, with its gradient, and its adaptive coefficient."""

import math

import pytest
import torch

from data.meta_actions.grammar import PIECES, parse
from data.settings import ActionRegularisation
from models.meta_actions.actions import ActionTerm, action_logprobs, divergence, entropy, legal_logprobs
from models.meta_actions.tags import boundaries, read_tags
from models.pretraining import word_tokenizer
from models.row_scores import Places, score
from models.scoring import TokenRow, completion_logits
from models.tokenization import sampled_offsets
from tests.data.meta_traces import FIXED, trace
from tests.tiny import tiny_llama

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
LEGAL = torch.tensor([[True, True, False, True], [True, False, True, False]])


def test_only_legal_actions_count_by_hand():
    logprobs = legal_logprobs(LOGITS, LEGAL)
    total = math.e + math.e**2 + math.e**4
    assert logprobs[0].exp()[[0, 1, 3]].tolist() == pytest.approx(
        [math.e / total, math.e**2 / total, math.e**4 / total]
    )
    assert logprobs[0, 2] == 0 and logprobs[1].tolist() == pytest.approx([-math.log(2), 0, -math.log(2), 0])
    by_hand = -sum(p * math.log(p) for p in (math.e / total, math.e**2 / total, math.e**4 / total)) / math.log(3)
    assert entropy(logprobs, LEGAL).tolist() == pytest.approx([by_hand, 1.0])


def test_divergence_is_exact_and_zero_from_itself():
    logprobs = legal_logprobs(LOGITS, LEGAL)
    assert divergence(logprobs, logprobs, LEGAL).tolist() == pytest.approx([0, 0])
    other = legal_logprobs(torch.tensor([[0.0] * 4, [math.log(3), 0, 0, 0]]), LEGAL)
    found = divergence(logprobs, other, LEGAL)
    assert found[1].item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert found[0] > 0


def test_gradients_of_illegal_actions_are_exactly_zero_and_finite():
    logits = LOGITS.clone().requires_grad_()
    settings = ActionRegularisation()
    term = ActionTerm(settings, read_tags(word_tokenizer(sorted(PIECES))), 0.01, 0.1)
    reference = legal_logprobs(torch.randn(2, 4), LEGAL)
    loss, _, _ = term.loss(logits, LEGAL, reference, 2)
    loss.backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[~LEGAL].tolist() == [0, 0, 0]
    assert logits.grad[0, 3] != 0


def test_the_coefficient_adapts_towards_the_target():
    settings = ActionRegularisation(entropy_coefficient=0.003, entropy_target=0.5, entropy_step=0.001)
    term = ActionTerm(settings, read_tags(word_tokenizer(sorted(PIECES))), 0.0, None)
    assert term.applied == 0
    for wanted in (0.001, 0.002, 0.003, 0.003):
        term.adapt(0.2)
        assert term.coefficient == pytest.approx(wanted) and term.applied == pytest.approx(wanted)
    term.adapt(0.8)
    assert term.coefficient == pytest.approx(0.002) and term.applied == 0
    term.adapt(0.5)
    assert term.applied == pytest.approx(0.001)


def test_the_engine_side_and_the_trainer_side_agree():
    tokenizer = word_tokenizer(sorted(PIECES))
    tags = read_tags(tokenizer)
    network = tiny_llama(vocabulary=len(tokenizer))
    rows, found = [], []
    for text in (FIXED, trace("<reason>\nabcdef\n</reason>")):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append(TokenRow([1, 5], ids))
        found.append(boundaries(tags, parse(text).blocks, ids, sampled_offsets(tokenizer, ids)[1], 0))
    measured = action_logprobs(network, rows, found, tags, 0.7, 10_000)
    assert [len(row) for row in measured] == [4, 2]
    logits, _ = completion_logits(network, rows[:1], 0.7)
    for boundary, values in zip(found[0], measured[0]):
        legal = torch.tensor([boundary.legal])
        expected = legal_logprobs(logits[boundary.column][list(tags.ids)][None], legal)
        assert torch.allclose(torch.tensor(values), expected[0], atol=1e-5)

    class Loaded:
        def __init__(self):
            self.network = network

    columns = [[b.column for b in row] for row in found]
    for layout, chunk in (("shared", 0), ("padded", 0), ("packed", 0), ("padded", 16)):
        scores = score(Loaded(), rows, 0.7, layout=layout, vocabulary_chunk=chunk, places=Places(columns, tags.ids))
        legal = torch.tensor([b.legal for row in found for b in row])
        expected = torch.tensor([values for row in measured for values in row])
        assert torch.allclose(legal_logprobs(scores.actions_KA, legal), expected, atol=1e-5)
