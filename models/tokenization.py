"""Text to token ids, on one path for warm-up, rollouts and evaluation.

A prompt is tokenised alone; a response is tokenised once, whole, and a start state is a cut of those ids, so that the
ids that a policy continues are ids that it was trained to write (tokenizers of GPT-2's kind merge a newline with the
spaces after it: the pieces tokenised apart are other ids).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import UserError
from data.prompts import chat_messages, prompt_text
from data.settings import Prompt


@dataclass(frozen=True)
class Encoded:
    """A demonstration as ids: the prompt, and the whole response with its EOS.

    `offsets` holds the characters (start, end) of the response that each of `response_ids` stands for; EOS stands for
    none, (len, len).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    offsets: list[tuple[int, int]]


def prompt_ids(tokenizer: Any, question: str, prompt: Prompt) -> list[int]:
    """Ids of the prompt of `question`: the template or the tokenizer's chat template, with at most one BOS, in front.

    BOS is what the tokenizer itself puts in front of a text; a chat template that writes BOS has the last word.
    Raises UserError for a chat prompt where the tokenizer has no chat template.
    """
    if prompt.kind == "plain":
        text = prompt_text(question, prompt)
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "prompt.kind is 'chat', but the model's tokenizer has no chat template; use a plain prompt, "
                "or a model with a chat template"
            )
        text = tokenizer.apply_chat_template(
            chat_messages(question, prompt), tokenize=False, add_generation_prompt=True
        )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _with_one_bos(tokenizer, ids)


def _with_one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` without repeated BOS in front; with one where the tokenizer puts it in front of every text."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    own = tokenizer("a")["input_ids"][:1] == [bos]
    return [bos, *ids[start:]] if start or own else ids


def encode_demonstration(tokenizer: Any, question: str, response: str, prompt: Prompt) -> Encoded:
    """The ids of a demonstration; `response_ids` ends in the tokenizer's EOS.

    Raises UserError for a tokenizer without EOS or without character offsets.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the model's tokenizer has no EOS token: a finished response cannot be marked; use another model"
        )
    ids, offsets = _response(tokenizer, response)
    end = len(response)
    return Encoded(prompt_ids(tokenizer, question, prompt), [*ids, tokenizer.eos_token_id], [*offsets, (end, end)])


def prefix_ids(tokenizer: Any, response: str, prefix: str) -> list[int]:
    """The ids of `response`, tokenised whole, up to the last token boundary at or before the end of `prefix`.

    Raises ValueError where `prefix` is not the beginning of `response`.
    """
    if not response.startswith(prefix):
        raise ValueError(f"the prefix {prefix[-40:]!r} is not the beginning of its response {response[:80]!r}")
    ids, offsets = _response(tokenizer, response)
    return ids[: boundary(offsets, len(prefix))]


def boundary(offsets: Sequence[tuple[int, int]], characters: int) -> int:
    """How many tokens lie wholly within the first `characters` characters.

    Several tokens that share one character (bytes of an emoji) each have its whole span, so they are never parted.
    """
    count = 0
    while count < len(offsets) and offsets[count][1] <= characters:
        count += 1
    return count


def _response(tokenizer: Any, response: str) -> tuple[list[int], list[tuple[int, int]]]:
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} gives no character offsets, which start states are cut by; "
            "use a model with a fast tokenizer (tokenizer.json)"
        )
    encoding = tokenizer(response, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], [(int(start), int(end)) for start, end in encoding["offset_mapping"]]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of `ids` without special tokens; spaces are left as the tokens have them.

    Decode a revealed prefix and its completion together: some tokenizers drop the space in front of the first token.
    """
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def sampled_offsets(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of sampled ids (`decode`) and the characters (start, end) that each stands for; special tokens: none.

    Sampled ids need not be those that the text is encoded to, so they are decoded, not encoded again. Several tokens
    that share one character (bytes of an emoji) all have its span.
    """
    text = decode(tokenizer, ids)
    pieces = [decode(tokenizer, [i]) for i in ids]
    if "".join(pieces) != text:
        pieces = _pieces_in_context(tokenizer, ids)
    if "".join(pieces) != text:  # rare: a decoder that looks further back than one token; exact, and quadratic
        ends = [len(decode(tokenizer, ids[: k + 1])) for k in range(len(ids))]
        return text, list(zip([0, *ends[:-1]], ends))
    offsets: list[tuple[int, int]] = []
    end, waiting = 0, 0
    for piece in pieces:
        start, end = end, end + len(piece)
        if piece and waiting:
            offsets[-waiting:] = [(start, end)] * waiting
        waiting = 0 if piece else waiting + 1
        offsets.append((start, end))
    return text, offsets


def _pieces_in_context(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The characters that each id adds to what the ids before it say; an unfinished character is added by its last."""
    pieces, before, read = [], 0, 0
    for k in range(len(ids)):
        known, longer = decode(tokenizer, ids[before:read]), decode(tokenizer, ids[before : k + 1])
        if len(longer) > len(known) and not longer.endswith("\ufffd"):
            pieces.append(longer[len(known) :])
            before, read = read, k + 1
        else:
            pieces.append("")
    return pieces


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a row: those of the generation config, of the model's config and of the tokenizer.

    Raises UserError where none is known.
    """
    found: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    if not found:
        raise UserError(
            "neither the model nor its tokenizer names an EOS token: rows would never end; use another model"
        )
    return frozenset(found)


def check_context(ids: Sequence[int], max_new_tokens: int, context: int, what: str) -> None:
    """Raises UserError where a prompt and its new tokens do not fit the context; a prompt is never cut."""
    if not ids:
        raise UserError(f"{what} has no tokens at all: a row needs at least one to continue; check the prompt template")
    if len(ids) + max_new_tokens > context:
        raise UserError(
            f"{what} has {len(ids)} tokens, and {max_new_tokens} new ones are asked for, but the model's context is "
            f"{context}; lower max_new_tokens, leave this row out or use a model with a longer context"
        )
