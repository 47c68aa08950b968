"""One prompt for warm-up, rollouts and evaluation."""

from data.prompts import chat_messages, prompt_text
from data.settings import ChatPrompt, PlainPrompt


def test_plain_prompt_replaces_the_question_only():
    template = "### Instruction:\n{question}\n\n### Response: {json} {0}"
    assert prompt_text("What is {question} or {x}?", PlainPrompt(template=template)) == (
        "### Instruction:\nWhat is {question} or {x}?\n\n### Response: {json} {0}"
    )
    assert prompt_text("a", PlainPrompt()) == "a\n"


def test_chat_messages_have_a_system_turn_only_where_one_is_set():
    assert chat_messages("2+2?", ChatPrompt()) == [{"role": "user", "content": "2+2?"}]
    assert chat_messages("2+2?", ChatPrompt(system="Think.", template="Q: {question}")) == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Q: 2+2?"},
    ]
