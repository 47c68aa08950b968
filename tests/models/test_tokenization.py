"""Prompts, responses and cuts as token ids."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.settings import ChatPrompt, PlainPrompt
from models.tokenization import boundary, check_context, decode, encode_demonstration, eos_ids, prefix_ids, prompt_ids
from tests.tiny import bpe_tokenizer, character_tokenizer

BPE = bpe_tokenizer()
CHARACTERS = character_tokenizer()
PROGRAM = "def solution():\n    apples = 12\n    return apples\n"


def chat(template: str):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_plain_prompt_has_one_bos_whether_or_not_the_template_writes_it():
    plain = prompt_ids(CHARACTERS, "Hi?", PlainPrompt(template="{question}\n"))
    assert plain[0] == 1 and plain.count(1) == 1
    assert decode(CHARACTERS, plain) == "Hi?\n"
    assert prompt_ids(CHARACTERS, "Hi?", PlainPrompt(template="<s>{question}\n")) == plain


def test_a_tokenizer_that_puts_no_bos_gets_none():
    assert prompt_ids(BPE, "apples", PlainPrompt(template="{question}")) == BPE("apples")["input_ids"]


@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_chat_prompt_has_one_bos(start):
    tokenizer = chat(start + "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]")
    ids = prompt_ids(tokenizer, "Hi?", ChatPrompt(system="Think."))
    assert ids[0] == 1 and ids.count(1) == 1
    assert decode(tokenizer, ids) == "[system]Think.\n[user]Hi?\n[assistant]"


def test_chat_prompt_without_a_template_is_a_user_error():
    with pytest.raises(UserError, match="chat template"):
        prompt_ids(character_tokenizer(), "Hi?", ChatPrompt())


def test_a_finished_response_ends_in_eos_and_its_offsets_cover_it():
    encoded = encode_demonstration(CHARACTERS, "Q", "ab\nc", PlainPrompt())
    assert encoded.response_ids[-1] == 2 and encoded.response_ids.count(2) == 1
    assert encoded.offsets == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
    assert decode(CHARACTERS, encoded.response_ids) == "ab\nc"


def test_prompt_of_a_demonstration_is_the_prompt_of_a_rollout():
    encoded = encode_demonstration(BPE, "How many apples?", PROGRAM, PlainPrompt())
    assert encoded.prompt_ids == prompt_ids(BPE, "How many apples?", PlainPrompt())


def test_cut_at_the_last_token_boundary_before_a_merged_newline():
    # "\n    return" is tokenised with newline and spaces in tokens that do not end where the line does.
    ids, offsets = BPE(PROGRAM)["input_ids"], BPE(PROGRAM, return_offsets_mapping=True)["offset_mapping"]
    cut = PROGRAM.index("apples") + 2  # inside a word
    prefix = prefix_ids(BPE, PROGRAM, PROGRAM[:cut])
    assert prefix == ids[: len(prefix)]
    assert len(decode(BPE, prefix)) <= cut
    assert offsets[len(prefix)][1] > cut


def test_prefix_of_pieces_tokenised_apart_would_be_other_ids():
    line = PROGRAM.index("\n") + 1
    apart = BPE(PROGRAM[:line])["input_ids"] + BPE(PROGRAM[line:])["input_ids"]
    assert apart != BPE(PROGRAM)["input_ids"]
    prefix = prefix_ids(BPE, PROGRAM, PROGRAM[:line])
    assert prefix == BPE(PROGRAM)["input_ids"][: len(prefix)]


def test_cut_zero_is_empty_and_cut_whole_leaves_eos_alone():
    assert prefix_ids(BPE, PROGRAM, "") == []
    encoded = encode_demonstration(BPE, "Q", PROGRAM, PlainPrompt())
    assert [*prefix_ids(BPE, PROGRAM, PROGRAM), BPE.eos_token_id] == encoded.response_ids


def test_a_trailing_space_of_a_prefix_survives():
    response = "The answer is 42 ."
    prefix = prefix_ids(CHARACTERS, response, "The answer is ")
    assert decode(CHARACTERS, prefix) == "The answer is "


def test_bytes_of_one_character_are_not_parted():
    response = "a€b"
    for cut in range(len(response) + 1):
        assert decode(BPE, prefix_ids(BPE, response, response[:cut])) in ("", "a", "a€", "a€b")


def test_a_prefix_of_another_text_is_refused():
    with pytest.raises(ValueError, match="not the beginning"):
        prefix_ids(BPE, "abc", "b")


@given(st.text(max_size=40), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_prefix_ids_are_an_exact_beginning_of_the_response_ids(response, cut):
    prefix = response[:cut]
    whole = BPE(response, add_special_tokens=False)["input_ids"]
    ids = prefix_ids(BPE, response, prefix)
    assert ids == whole[: len(ids)]
    assert prefix.startswith(decode(BPE, ids))


def test_boundary():
    assert [boundary([(0, 2), (2, 3), (3, 6)], n) for n in range(7)] == [0, 0, 1, 2, 2, 2, 3]


def test_eos_ids_come_from_model_generation_config_and_tokenizer():
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=32000), generation_config=SimpleNamespace(eos_token_id=[32007, 32001])
    )
    assert eos_ids(model, SimpleNamespace(eos_token_id=2)) == {2, 32000, 32001, 32007}
    nothing = SimpleNamespace(config=SimpleNamespace(eos_token_id=None), generation_config=None)
    with pytest.raises(UserError, match="EOS"):
        eos_ids(nothing, SimpleNamespace(eos_token_id=None))


def test_a_prompt_over_the_context_is_refused_by_name():
    check_context([1] * 10, 6, 16, "row 3")
    with pytest.raises(UserError, match=r"row 3 has 11 tokens.*context is 16"):
        check_context([1] * 11, 6, 16, "row 3")
    with pytest.raises(UserError, match="row 3 has no tokens"):
        check_context([], 6, 16, "row 3")
