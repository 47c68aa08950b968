"""Tags as tokens, boundaries in sampled ids, offsets of sampled ids."""

import pytest

from data.errors import UserError
from data.meta_actions.grammar import ACTIONS, PIECES, opening, parse
from models.meta_actions.tags import boundaries, read_tags
from models.pretraining import word_tokenizer
from models.tokenization import decode, sampled_offsets
from tests.data.meta_traces import FIXED
from tests.tiny import bpe_tokenizer, character_tokenizer


def trained_bpe():
    """A byte-level BPE tokenizer whose merges hold words of the tags, and brackets with a newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["reason critique refine answer >\n </ "] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_tiny_tokenizer_holds_each_tag_as_one_token():
    tokenizer = word_tokenizer(sorted(PIECES))
    tags = read_tags(tokenizer)
    assert tags.common == () and len(set(tags.ids)) == 4
    assert tokenizer.convert_ids_to_tokens(list(tags.ids)) == [opening(action) for action in ACTIONS]
    for piece in PIECES:
        assert len(tokenizer(piece, add_special_tokens=False)["input_ids"]) == 1


def test_tags_of_several_tokens_are_told_apart_by_one():
    tokenizer = trained_bpe()
    tags = read_tags(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(tags.common)) == ["<"]
    assert len(set(tags.ids)) == 4


@pytest.mark.parametrize("make", [character_tokenizer, bpe_tokenizer])
def test_a_tokenizer_that_spells_the_tags_is_refused(make):
    with pytest.raises(UserError, match="do not all differ at their token 2"):
        read_tags(make())


@pytest.mark.parametrize("make", [lambda: word_tokenizer(sorted(PIECES)), trained_bpe])
def test_boundaries_are_the_tokens_that_decide(make):
    tokenizer = make()
    ids = tokenizer(FIXED, add_special_tokens=False)["input_ids"]
    text, offsets = sampled_offsets(tokenizer, ids)
    assert text == FIXED == decode(tokenizer, ids)
    tags = read_tags(tokenizer)
    found = boundaries(tags, parse(text).blocks, ids, offsets, 0)
    assert [b.action for b in found] == ["reason", "critique", "refine", "answer"]
    assert [b.state for b in found] == ["start", "reason", "critique_wrong", "refine"]
    assert [tuple(b.legal) for b in found][2] == (True, False, True, False)
    for b in found:
        assert ids[b.column] == tags.ids[ACTIONS.index(b.action)]
    # After a prefix that holds the first block, its choice is not the completion's.
    prefix = found[1].column - len(tags.common)
    later = boundaries(tags, parse(text).blocks, ids, offsets, prefix)
    assert [b.action for b in later] == ["critique", "refine", "answer"]
    assert later[0].column == len(tags.common)


def test_a_tag_sampled_in_other_tokens_is_left_out():
    tokenizer = word_tokenizer(sorted(PIECES))
    spelt = character_tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "<critique>"]
    ids = tokenizer(FIXED, add_special_tokens=False)["input_ids"]
    place = ids.index(tokenizer.convert_tokens_to_ids("<critique>"))
    ids = [*ids[:place], *letters, *ids[place + 1 :]]
    text, offsets = sampled_offsets(tokenizer, ids)
    assert text == FIXED and spelt is not None
    found = boundaries(read_tags(tokenizer), parse(text).blocks, ids, offsets, 0)
    assert [b.action for b in found] == ["reason", "refine", "answer"]


@pytest.mark.parametrize("text", ["plain text", "a naïve 🙂 smile\n  twice", "日本語 and spaces  "])
def test_offsets_of_sampled_ids(text):
    tokenizer = trained_bpe()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded, offsets = sampled_offsets(tokenizer, ids)
    assert decoded == text and offsets[-1][1] == len(text)
    reference = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert offsets == [tuple(pair) for pair in reference]


def test_offsets_of_ids_that_are_no_text_do_not_raise():
    tokenizer = trained_bpe()
    ids = tokenizer("🙂", add_special_tokens=False)["input_ids"][:2]
    text, offsets = sampled_offsets(tokenizer, [*ids, *tokenizer("x", add_special_tokens=False)["input_ids"]])
    assert offsets[-1][1] == len(text) and text.endswith("x")
