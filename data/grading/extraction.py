"""Which part of a text is its answer: the last complete one, outside thinking, before a run-on into a new question."""

import bisect
import re
from dataclasses import dataclass

MAX_TEXT = 200_000
"""Only the last characters of a longer text are read (our choice)."""

_THINK = re.compile(
    r"<\s*(/?)\s*(?:think|thinking|thoughts?|reasoning|scratchpad)(?:\s[^<>]{0,200})?>|<\|(?:begin|(end))_of_thought\|>"
    r"|\[(/?)think\]|◁(/?)think▷",
    re.IGNORECASE,
)
_RUN_ON = re.compile(
    r"(?:^[ \t>*#]*|(?<=[.!?}\]>$])[ \t]+|(?<=[0-9])[ \t]+)"
    r"(?:(?:question|problem|instruction|exercise)\s*(?:no\.?\s*)?[0-9]*\s*[:.](?=\s)|(?:q|human|user|input)\s*[0-9]*\s*:)"
    r"|<\|(?:im_start|im_end|user|end_of_turn|endoftext|eot_id)\|>|</s>|<eos>|<end_of_turn>|\[INST\]"
    r"|Below is an instruction",
    re.IGNORECASE | re.MULTILINE,
)
_RUN_ON_WORDS = (
    "question",
    "problem",
    "instruction",
    "exercise",
    "human",
    "user",
    "input",
    "<|",
    "[inst]",
    "</s>",
    "<e",
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"(?<!#)(####?)(?!#)[ \t:]*([^\n]*)")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\]+")
_TAG_OPEN = re.compile(r"<answer>", re.IGNORECASE)
_TAG_CLOSE = re.compile(r"</answer>", re.IGNORECASE)
_NEXT_LINE = re.compile(r"\s*([^\n]*)")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_MOST_MARKS, _MOST_PHRASES, _LONGEST_SENTENCE = 64, 8, 1000
_PHRASE_TAIL = (
    r"\b(?:\s+(?:to|of|for)\s+(?:the|this|our)\s+(?:question|problem))?[*_\s]*"
    r"(?:is\s*:|is\b|are\b|would\s+be\b|should\s+be\b|must\s+be\b|:|=|-(?=\s))[*_]*"
    r"(?:\s*(?:therefore|thus|then|hence|simply|just)\b)?"
)
_HEADING = r"|^[ \t]*(?:#{1,6}|\*\*)[ \t*_]*(?:the\s+)?(?:final\s+)?answer[ \t*_#]*(?=\n)"
_PHRASE = re.compile(r"\banswer" + _PHRASE_TAIL + _HEADING, re.IGNORECASE | re.MULTILINE)
_OPTION_PHRASE = re.compile(
    rf"\b(?:answer|option|choice){_PHRASE_TAIL}|\banswer\s+(?=\(?(?-i:[A-J])\)?\s*[.!]?\s*\Z){_HEADING}",
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAYED = re.compile(r"\s*(?:\\\[(.*?)\\\]|\$\$(.*?)\$\$)[ \t.]*", re.DOTALL)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot)|n['’]t|\\n(?:eq?|ot)|≠)(?:\s+(?!but\b)[A-Za-z]+){0,3}[\s$*:\\(\[=]*\Z", re.IGNORECASE
)
_DENIED_AFTER = re.compile(
    r"(?:\A[\s$*).\]\\]*(?=(?:is|was|are|isn['’]t|wasn['’]t|seems|cannot|can['’]t|may|might|could|must)\b)"
    r"|\b(?:this|that|it|which|answer|result|value|i)(?:['’](?:s|m))?\s+)"
    r"(?:[a-z]+\s+){0,2}?"
    r"(?:wrong|incorrect|mistaken|(?:an?\s+)?(?:error|mistake)\b|retract|withdraw"
    r"|take\s+(?:it|that|this)\s+back|(?:not|[a-z]+n['’]t|cannot)(?:\s+be)?\s+(?:the\s+|an?\s+|my\s+)?"
    r"(?:(?:final\s+)?answer|right|correct|true|valid|it)\b)",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\A[\s.!?*_$)\]\"'”’]*(?:no|wait|hmm+|oops|sorry|actually|correction|rather|or)\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=[\"'”)*_\]]*(?:\s|$))|\n")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_HEDGES = frozenset("or either maybe perhaps possibly alternatively if might could else unless otherwise".split())
_CORRECTIONS = frozenset(
    """wait no not actually correction correcting corrected sorry mistake mistaken error instead hmm oops recheck
    rechecking
    check checking wrong incorrect rather scratch however but so thus therefore hence simplifying simplified
    simplifies let
    reconsider reconsidering oh becomes equals""".split()
)
_SHORT_GAP, _HEDGED_GAP = 5, 8


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer that a marker points at: its place, its text, and which marker ("box", "hash", "tag", "phrase")."""

    start: int
    end: int
    text: str
    marker: str


def visible_part(text: str) -> str:
    """The text outside `<think>…</think>`; an opened and unfinished one hides everything after it."""
    if not ("<" in text or "[" in text or "◁" in text) or not _THINK.search(text):
        return text
    kept, position, hidden = [], 0, False
    for match in _THINK.finditer(text):
        if not any(match.groups()):
            if not hidden:
                kept.append(text[position : match.start()])
            hidden = True
        else:
            if not hidden:
                kept.clear()  # closed without being opened: the prompt opened it
            hidden, position = False, match.end()
    if not hidden:
        kept.append(text[position:])
    return "\n".join(kept)


def before_run_on(text: str) -> str:
    """The text before it goes on with another question. A question that the text begins with is a restatement."""
    lower = text.lower()  # most texts hold no such word, and looking for words is much faster than the pattern
    if not any(word in lower for word in _RUN_ON_WORDS) and not ("q" in lower and ":" in lower):
        return text
    for match in _RUN_ON.finditer(text):
        if text[: match.start()].strip():
            return text[: match.start()]
    return text


def readable_part(text: str) -> str:
    """The part of a completion in which an answer counts."""
    return before_run_on(visible_part(text[-MAX_TEXT:]))


def last_sentence(text: str) -> str:
    """The last sentence of the last line that is not empty; of a very long line only the end is looked at."""
    line = text.strip().rsplit("\n", 1)[-1].strip()[-_LONGEST_SENTENCE:]
    start = 0
    for match in _SENTENCE_END.finditer(line):
        if line[match.end() :].strip(" \t\"'”)*_]"):
            start = match.end()
    return line[start:].strip()


def _closings(text: str) -> dict[int, int]:
    """Where each brace that is closed closes; escaped braces do not count. One pass, whatever the text."""
    pairs, open_at = {}, []
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            open_at.append(match.start())
        elif match[0] == "}" and open_at:
            pairs[open_at.pop()] = match.start()
    return pairs


def _boxes(text: str) -> tuple[list[Marked], bool]:
    """The last complete boxes, outermost only, and whether the last box is unfinished."""
    found, position, unfinished = [], 0, False
    closings = _closings(text)
    for match in _BOX.finditer(text):
        if match.start() < position:
            continue  # inside a box already taken
        start = match.end()
        if text[start : start + 1] == "{":
            end = closings.get(start)
            unfinished = end is None
            if end is not None:
                found.append(Marked(match.start(), end + 1, _unboxed(text[start + 1 : end]), "box"))
                position = end + 1
        else:
            bare = _BARE.match(text, start)
            if bare:
                found.append(Marked(match.start(), bare.end(), bare[0].rstrip(".,;"), "box"))
                position, unfinished = bare.end(), False
    return found[-_MOST_MARKS:], unfinished


def _unboxed(text: str) -> str:
    """`\\boxed{7}` inside a box is 7."""
    inner = text.strip()
    while (match := _BOX.match(inner)) and inner.endswith("}") and inner[match.end() : match.end() + 1] == "{":
        if _closings(inner).get(match.end()) != len(inner) - 1:
            break
        inner = inner[match.end() + 1 : -1].strip()
    return inner


def _tags(text: str) -> tuple[list[Marked], bool]:
    """The last complete `<answer>…</answer>`, and whether one is left open."""
    opens = [match.end() for match in _TAG_OPEN.finditer(text)]
    closes = [match.start() for match in _TAG_CLOSE.finditer(text)]
    found, after = [], len(text) + 1
    for close in reversed(closes[-_MOST_MARKS:]):
        place = bisect.bisect_right(opens, close) - 1
        if place >= 0 and close < after:
            found.append(Marked(opens[place] - 8, close + 9, text[opens[place] : close].strip(), "tag"))
            after = opens[place] - 8
    return found[::-1], bool(opens) and (not closes or opens[-1] > closes[-1])


def strong_answers(text: str) -> tuple[list[Marked], bool]:
    """Answers in boxes, after hashes and in answer tags, in order, and whether the text ends in an unfinished one."""
    boxes, unfinished = _boxes(text) if "box" in text else ([], False)
    found = list(boxes)
    if "###" in text:
        for match in list(_HASHES.finditer(text, text.index("###")))[-_MOST_MARKS:]:
            mark = Marked(match.start(), match.end(), match[2].strip(), "hash")
            if not boxes or not _overlaps(mark, boxes):
                found.append(mark)
    if "nswer>" in text or "NSWER>" in text:
        tags, open_tag = _tags(text)
        found = [mark for mark in found if mark.marker == "box" or not _overlaps(mark, tags)]
        found += [mark for mark in tags if not _overlaps(mark, boxes)]
        unfinished = unfinished or open_tag
    if len(found) > 1:
        found.sort(key=lambda mark: mark.start)
    return found, unfinished


def _overlaps(mark: Marked, others: list[Marked]) -> bool:
    return any(other.start < mark.end and mark.start < other.end for other in others)


def phrase_answers(text: str, options: bool = False) -> list[Marked]:
    """What follows the last few "the answer is" (with `options` also "the correct option is"), to the sentence's
    end."""
    found = []
    for match in list((_OPTION_PHRASE if options else _PHRASE).finditer(text))[-_MOST_PHRASES:]:
        end = _SENTENCE_END.search(text, match.end() + 1)
        stop = end.start() if end else len(text)
        if end and end[0] == "?":
            stop = end.end()  # a question is no answer: the mark stays, and no kind of answer is read with it
        content = text[match.end() : stop].strip(" \t*_:")
        displayed = _DISPLAYED.match(text, match.end())
        if displayed:
            content, stop = (displayed[1] or displayed[2] or "").strip(), displayed.end()
        elif not content.strip() and end and end[0] == "\n":
            line = _NEXT_LINE.match(text, match.end())
            content, stop = line[1].strip(" \t*_:."), line.end()
        found.append(Marked(match.start(), stop, content, "phrase"))
    return found


def denied(text: str, mark: Marked, marked: bool) -> bool:
    """Whether the text takes the answer back: "not" directly before a box, "is wrong", "I retract it" after it.

    A phrase (`marked` False) is also taken back by what begins with "No," or "Wait,": a mark is the stronger statement.
    """
    rest = text[mark.end :]
    if mark.marker in ("box", "tag") and _DENIED_BEFORE.search(text[max(0, mark.start - 120) : mark.start]):
        return True
    return bool(_DENIED_AFTER.search(rest)) or (not marked and bool(_TAKEN_BACK.match(rest)))


def in_one_breath(gap: str) -> bool:
    """Whether two answers with this text between them are given together: a list of several, or spraying.

    They are where at most five words stand between them without one that takes the first back ("wait", "so"), or at
    most
    eight with one that hedges ("or", "maybe"). Our choice.
    """
    if len(gap) > 200:
        return False
    words = [word.lower() for word in _WORD.findall(_COMMANDS.sub(" ", gap))]
    if _HEDGES.intersection(words):
        return len(words) <= _HEDGED_GAP
    return len(words) <= _SHORT_GAP and not _CORRECTIONS.intersection(words)


def in_short_succession(gap: str) -> bool:
    """Whether so little stands between two answers that several of them are spraying even if each is taken back."""
    return len(gap) <= 200 and len(_WORD.findall(gap)) <= _SHORT_GAP
