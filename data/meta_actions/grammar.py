"""The grammar of a meta-action trace, a parser that takes any text, and the spans of its blocks in tokens.

    trace  = block { block } answer
    block  = "<reason>" body "</reason>" | "<critique>" body verdict "</critique>" | "<refine>" body "</refine>"
    answer = "<answer>" \\boxed{...} "</answer>"                    # exactly one, last

White space may stand between blocks. The tag set, the transition table and every limit are our choice: of MetaAct-RL
its abstract alone is known, which names the actions "forward reasoning, critique, refinement".
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["reason", "critique", "refine", "answer"]
State = Literal["start", "reason", "critique_correct", "critique_wrong", "refine"]
Status = Literal["ok", "truncated", "malformed"]

ACTIONS: tuple[Action, ...] = ("reason", "critique", "refine", "answer")
LEGAL: dict[State, tuple[Action, ...]] = {
    "start": ("reason",),
    "reason": ("reason", "critique", "answer"),
    "critique_correct": ("reason", "answer"),
    "critique_wrong": ("reason", "refine"),
    "refine": ("reason", "critique", "answer"),
}
"""State at a block boundary → the actions that may follow."""
MAX_BLOCKS = 8
"""Most blocks of a trace, the answer among them."""
MIN_BODY = 4
"""Fewest characters of a body that are no white space; of a critique, those before its verdict."""
VERDICT = "Verdict:"

PIECES: tuple[str, ...] = (
    *(f"<{slash}{action}>" for action in ACTIONS for slash in ("", "/")),
    *(VERDICT, " correct", " wrong", " at", " step", "\\boxed{"),
)
"""The grammar's own words: a tiny model's tokenizer holds each as one token."""

_TAG = re.compile(r"<(/?)(reason|critique|refine|answer)>")
_VERDICT_LINE = re.compile(r"Verdict: (?:correct|wrong at step ([1-9][0-9]{0,3}))")
_BOXED = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Block:
    """One block: `text[start:end]` with its tags, `text[body_start:body_end]` without."""

    action: Action
    before: str
    """White space between the block before and this one."""
    body: str
    start: int
    end: int
    correct: bool | None = None
    """A critique's verdict."""
    wrong_step: int | None = None
    """The step that a critique's verdict names, from 1."""

    @property
    def body_start(self) -> int:
        """Where the body begins."""
        return self.start + len(self.action) + 2

    @property
    def body_end(self) -> int:
        """Where the body ends."""
        return self.end - len(self.action) - 3

    @property
    def state(self) -> State:
        """The state after this block (an answer ends the trace: it has none, and this raises ValueError)."""
        if self.action == "answer":
            raise ValueError("nothing follows an answer")
        if self.action == "critique":
            return "critique_correct" if self.correct else "critique_wrong"
        return self.action


@dataclass(frozen=True, slots=True)
class Trace:
    """What a text is as a trace.

    `ok`: legal and complete; `truncated`: the beginning of a legal trace; `malformed`: no legal trace begins like this,
    `code` says why. `blocks` are the complete legal blocks before the fault or the end.
    """

    status: Status
    code: str | None
    blocks: tuple[Block, ...]
    tail: str
    """The text after the last of `blocks`."""

    @property
    def answer(self) -> str | None:
        """The body of the answer block, which alone is graded; None unless the trace is `ok`."""
        return self.blocks[-1].body if self.status == "ok" else None

    def states(self) -> list[State]:
        """The state in front of each block."""
        return ["start", *(block.state for block in self.blocks[:-1])][: len(self.blocks)]


def opening(action: Action) -> str:
    """The tag that begins a block."""
    return f"<{action}>"


def closing(action: Action) -> str:
    """The tag that ends a block."""
    return f"</{action}>"


def block(action: Action, body: str) -> str:
    """A block as training traces write it, its body on lines of its own."""
    return f"{opening(action)}\n{body}\n{closing(action)}"


def verdict(wrong_step: int | None) -> str:
    """The line that ends a critique: correct, or the number of the first wrong step (from 1)."""
    return f"{VERDICT} correct" if wrong_step is None else f"{VERDICT} wrong at step {wrong_step}"


def answer_block(answer: str) -> str:
    """The last block of a trace."""
    return block("answer", f"{_BOXED}{answer}}}")


def holds_tag(text: str) -> bool:
    """Whether a text has a tag in it, so that it cannot be a body."""
    return _TAG.search(text) is not None


def render(trace: Trace) -> str:
    """The text of a trace: `render(parse(text)) == text` for every text."""
    parts = [f"{b.before}{opening(b.action)}{b.body}{closing(b.action)}" for b in trace.blocks]
    return "".join(parts) + trace.tail


def parse(text: str, max_blocks: int = MAX_BLOCKS) -> Trace:
    """What `text` is as a trace. Never raises for any text, and takes time linear in its length."""
    blocks: list[Block] = []
    state: State | None = "start"
    end = 0
    opened: re.Match[str] | None = None

    def failed(code: str) -> Trace:
        return Trace("malformed", code, tuple(blocks), text[end:])

    for tag in _TAG.finditer(text):
        closes, action = bool(tag[1]), tag[2]
        if opened is None:
            fault = _fault_of_opening(closes, action, state, text[end : tag.start()], len(blocks), max_blocks)
            if fault:
                return failed(fault)
            opened = tag
            continue
        if not closes:
            return failed("nested_tag")
        if action != opened[2]:
            return failed("mismatched_tag")
        body = text[opened.end() : tag.start()]
        fault, correct, wrong_step = _read_body(action, body)
        if fault:
            return failed(fault)
        before = text[end : opened.start()]
        blocks.append(Block(action, before, body, opened.start(), tag.end(), correct, wrong_step))
        end, opened = tag.end(), None
        state = None if action == "answer" else blocks[-1].state
    tail = text[end:]
    if opened is None and tail.strip() and not (state is not None and _begins_tag(tail, state)):
        return failed("text_outside" if state is not None else "text_after_answer")
    return Trace("ok" if state is None else "truncated", None, tuple(blocks), tail)


def _fault_of_opening(
    closes: bool, action: str, state: State | None, between: str, blocks: int, max_blocks: int
) -> str | None:
    """Why a tag may not stand between blocks; None where it may."""
    if state is None:
        return "text_after_answer"
    if closes:
        return "stray_tag"
    if between.strip():
        return "text_outside"
    if action not in LEGAL[state]:
        return "illegal_transition"
    if blocks >= max_blocks or (blocks == max_blocks - 1 and action != "answer"):
        return "too_many_blocks"
    return None


def _begins_tag(tail: str, state: State) -> bool:
    """Whether a text may be the beginning of a legal opening tag."""
    return any(opening(action).startswith(tail.lstrip()) for action in LEGAL[state])


def _read_body(action: str, body: str) -> tuple[str | None, bool | None, int | None]:
    """Why a body is at fault (None: it is not), and the verdict of a critique."""
    if action == "answer":
        return (None if _is_boxed(body.strip()) else "answer_not_boxed"), None, None
    correct = wrong_step = None
    content = body
    if action == "critique":
        content, _, last = body.rstrip().rpartition("\n")
        match = _VERDICT_LINE.fullmatch(last.strip())
        if match is None:
            return "no_verdict", None, None
        if VERDICT in content:
            return "several_verdicts", None, None
        correct = match[1] is None
        wrong_step = None if correct else int(match[1])
    if sum(map(len, content.split())) < MIN_BODY:
        return "short_body", None, None
    return None, correct, wrong_step


def _is_boxed(text: str) -> bool:
    """Whether a text is one box with something in it and nothing around it."""
    if not (text.startswith(_BOXED) and text.endswith("}")) or text.count(_BOXED) != 1 or "\n" in text:
        return False
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0 and character == "}" and position < len(text) - 1:
            return False
    return depth == 0 and bool(text[len(_BOXED) : -1].strip())


def token_spans(blocks: Sequence[Block], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each block the tokens [first, end) that hold any of its characters, tags included.

    `offsets` are the characters (start, end) of each token, in order; a token may be shared by two blocks where a
    tokenizer merges a closing tag's last character with what follows.
    """
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    return [(bisect_right(ends, block.start), bisect_left(starts, block.end)) for block in blocks]
