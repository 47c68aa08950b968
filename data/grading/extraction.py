"""Which part of a text is its answer: the last complete one, outside thinking, before a run-on into a new question."""

import re
from dataclasses import dataclass

MAX_TEXT = 200_000
"""Only the last characters of a longer text are read (our choice)."""

_THINK = re.compile(r"<(/?)(think|thinking|thought|reasoning)\s*>", re.IGNORECASE)
_RUN_ON = re.compile(
    r"(?:^[ \t>*#]*|(?<=[.!?}\]>$])[ \t]+|(?<=[0-9])[ \t]+)"
    r"(?:(?:question|problem|instruction|exercise)\s*(?:no\.?\s*)?[0-9]*\s*[:.](?=\s)|(?:q|human|user|input)\s*[0-9]*\s*:)"
    r"|<\|(?:im_start|user|end_of_turn|endoftext|eot_id)\|>|\[INST\]|Below is an instruction",
    re.IGNORECASE | re.MULTILINE,
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"(?<!#)(####?)(?!#)[ \t]*([^\n]*)")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE_TAIL = (
    r"\b(?:\s+(?:to|of|for)\s+(?:the|this|our)\s+(?:question|problem))?[*_\s]*"
    r"(?:is\s*:|is\b|are\b|would\s+be\b|should\s+be\b|must\s+be\b|:|=|-(?=\s))[*_]*"
    r"(?:\s*(?:therefore|thus|then|hence|simply|just)\b)?"
)
_PHRASE = re.compile(r"\banswer" + _PHRASE_TAIL, re.IGNORECASE)
_OPTION_PHRASE = re.compile(r"\b(?:answer|option|choice)" + _PHRASE_TAIL, re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=[\"'”)*_\]]*(?:\s|$))|\n")
_CONNECTORS = re.compile(
    r"(?:[\s.,;:$*_&|/()\[\]{}\-+~]|\\[,;:! ()\[\]]|\\(?:text|mbox)\b|\\(?:qquad|quad|newline)\b|\b(?:and|or|also|then|either"
    r"|maybe|perhaps|possibly|alternatively|else|the|final|answers?|is|it|could|be|are|a|another|option|choice|might)\b"
    r"|[A-Za-z]\w?\s*=)*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer that a marker points at: its place, its text, and which marker ("box", "hash", "tag", "phrase")."""

    start: int
    end: int
    text: str
    marker: str


def visible_part(text: str) -> str:
    """The text outside `<think>…</think>`; an opened and unfinished one hides everything after it."""
    if "<" not in text or not _THINK.search(text):
        return text
    kept, position, hidden = [], 0, False
    for match in _THINK.finditer(text):
        if not match[1]:
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
    for match in _RUN_ON.finditer(text):
        if text[: match.start()].strip():
            return text[: match.start()]
    return text


def readable_part(text: str) -> str:
    """The part of a completion in which an answer counts."""
    return before_run_on(visible_part(text[-MAX_TEXT:]))


def last_sentence(text: str) -> str:
    """The last sentence of the last line that is not empty."""
    line = text.strip().rsplit("\n", 1)[-1].strip()
    start = 0
    for match in _SENTENCE_END.finditer(line):
        if line[match.end() :].strip(" \t\"'”)*_]"):
            start = match.end()
    return line[start:].strip()


def _boxes(text: str) -> tuple[list[Marked], bool]:
    """Complete boxes, outermost only, and whether the last one is unfinished."""
    found, position, unfinished = [], 0, False
    for match in _BOX.finditer(text):
        if match.start() < position:
            continue  # inside a box already taken
        if match.end() < len(text) and text[match.end()] == "{":
            end = _matching_brace(text, match.end())
            unfinished = end is None
            if end is None:
                continue
            found.append(Marked(match.start(), end + 1, text[match.end() + 1 : end], "box"))
            position = end + 1
        else:
            bare = re.compile(r"[^\s${}\\]+").match(text, match.end())
            if bare:
                found.append(Marked(match.start(), bare.end(), bare[0].rstrip(".,;"), "box"))
                position, unfinished = bare.end(), False
    return [Marked(m.start, m.end, _unboxed(m.text), "box") for m in found], unfinished


def _unboxed(text: str) -> str:
    """`\\boxed{7}` inside a box is 7."""
    match = _BOX.match(text.strip())
    inner = text.strip()
    while match and inner.endswith("}") and _matching_brace(inner, match.end()) == len(inner) - 1:
        inner = inner[match.end() + 1 : -1].strip()
        match = _BOX.match(inner)
    return inner


def _matching_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes text[opening]; escaped braces do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def strong_answers(text: str) -> tuple[list[Marked], bool]:
    """Answers in boxes, after hashes and in answer tags, in order, and whether the text ends in an unfinished box."""
    boxes, unfinished = _boxes(text) if "box" in text else ([], False)
    found = list(boxes)
    if "###" in text:
        for match in _HASHES.finditer(text):
            if not any(box.start < match.end() and match.start() < box.end for box in boxes):
                found.append(Marked(match.start(), match.end(), match[2].strip(), "hash"))
    if "<answer>" in text.lower():
        found = [mark for mark in found if mark.marker != "hash"]
        for match in _TAG.finditer(text):
            inside = [box for box in boxes if match.start() < box.start and box.end <= match.end()]
            if not inside:
                found.append(Marked(match.start(), match.end(), match[1].strip(), "tag"))
    if len(found) > 1:
        found.sort(key=lambda mark: mark.start)
    return found, unfinished


def phrase_answers(text: str, options: bool = False) -> list[Marked]:
    """What follows "the answer is" (with `options` also "the correct option is") up to the sentence's end, in order."""
    found = []
    for match in (_OPTION_PHRASE if options else _PHRASE).finditer(text):
        end = _SENTENCE_END.search(text, match.end() + 1)
        stop = end.start() if end else len(text)
        content = text[match.end() : stop].strip(" \t*_:")
        if not content and end and end[0] == "\n":
            line = re.compile(r"\s*([^\n]*)").match(text, match.end())
            content, stop = line[1].strip(" \t*_:."), line.end()
        found.append(Marked(match.start(), stop, content, "phrase"))
    return found


def only_connectors(gap: str) -> bool:
    """True where nothing but punctuation and words like "or" stands between two answers: they are one list, or spraying."""
    return len(gap) < 200 and _CONNECTORS.fullmatch(gap) is not None
