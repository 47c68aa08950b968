"""Warm-up traces from plain demonstrations and wrong attempts: spliced, filtered, masked, counted.

The wrong attempts come from elsewhere: from a policy (models/meta_actions/synthesis.py), from a suite that knows its
own mistakes, or from one spoilt step (`corrupted`). All of it is our design; docs/meta_actions.md says what it follows.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.meta_actions.grammar import (
    MAX_BLOCKS,
    answer_block,
    block,
    holds_tag,
    parse,
    verdict,
)
from data.meta_actions.judging import judge
from data.settings import TraceSynthesis
from data.suites.base import MARKER, Suite

LEAK = re.compile(r"reference|given (?:answer|solution)|gold|ground truth", re.IGNORECASE)
"""Words by which a critique shows that it was written with the answer at hand."""
_NUMBER = re.compile(r"\d+")
_OPERATOR = re.compile(r" ([-+*/]) ")


@dataclass(frozen=True)
class Demonstration:
    """A right attempt: its steps, what follows them (the answer marker), and the gold."""

    item_id: str
    question: str
    steps: tuple[str, ...]
    tail: str
    answer: str
    answer_kind: str

    @property
    def response(self) -> str:
        """The whole text."""
        return "".join(self.steps) + self.tail

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Demonstration":
        """From a row of the table demonstrations."""
        steps = tuple(row["steps"])
        tail = row["response"][len("".join(steps)) :]
        return cls(row["item_id"], row["question"], steps, tail, row["answer"], row["answer_kind"])


@dataclass(frozen=True)
class Wrong:
    """A wrong attempt, and how a right one goes on from the step before its first wrong one."""

    steps: tuple[str, ...]
    tail: str
    bad_step: int
    """From 1."""
    repair: str
    """The right continuation after `bad_step` − 1 steps, with its answer."""

    @property
    def response(self) -> str:
        """The whole text."""
        return "".join(self.steps) + self.tail


@dataclass(frozen=True)
class Example:
    """A warm-up trace: a row of the table traces without its item."""

    kind: str
    text: str
    unlearned: tuple[tuple[int, int], ...]


class Refused(Exception):
    """A trace that a filter keeps out; the text is the filter's name."""


class _Writer:
    """Puts a trace together, and remembers which characters carry no loss."""

    def __init__(self, demonstration: Demonstration, settings: TraceSynthesis, suite: Suite | None) -> None:
        self.demonstration = demonstration
        self.settings = settings
        self.suite = suite
        self.text = ""
        self.unlearned: list[tuple[int, int]] = []

    def add(self, action: str, body: str, wrong_from: int | None = None, wrong_to: int | None = None) -> None:
        """Appends a block; characters [wrong_from, wrong_to) of its body are a wrong decision (to the end: None)."""
        if holds_tag(body):
            raise Refused("tag_in_text")
        self.text += "\n" if self.text else ""
        start = len(self.text) + len(action) + 3  # tag and newline
        self.text += block(action, body)
        if wrong_from is not None and self.settings.wrong_content != "learn":
            to = len(body) if self.settings.wrong_content == "mask_all" or wrong_to is None else wrong_to
            self.unlearned.append((start + wrong_from, start + to))

    def critique(self, attempt: str, wrong_step: int | None, steps: Sequence[str]) -> None:
        """Appends a critique of `attempt` with the true verdict. Raises Refused for one that a filter keeps out."""
        body = critique_body(self.suite, self.demonstration.question, attempt, wrong_step, steps)
        if len(body) > self.settings.longest_critique * len(attempt):
            raise Refused("critique_too_long")
        if LEAK.search(body):
            raise Refused("leak_words")
        if wrong_step is not None and _says(body, self.demonstration.answer):
            raise Refused("leak_answer")
        self.add("critique", f"{body}\n{verdict(wrong_step)}")

    def wrong_attempt(self, action: str, attempt: Wrong, skipped: int) -> None:
        """Appends a wrong attempt from its step `skipped` + 1 on."""
        steps = attempt.steps
        first = len("".join(steps[skipped : attempt.bad_step - 1]))
        body = "".join(steps[skipped:]) + attempt.tail
        self.add(action, body.rstrip("\n"), first, first + len(steps[attempt.bad_step - 1].rstrip("\n")))

    def finished(self, kind: str) -> Example:
        """The example with its answer block. Raises Refused where it is no legal trace with a right answer."""
        self.text += "\n" + answer_block(self.demonstration.answer)
        judged = judge(self.text, self.demonstration.answer, self.demonstration.answer_kind)
        if judged.trace.status != "ok":
            raise Refused(f"not_legal: {judged.trace.code}")
        if not judged.correct:
            raise Refused("answer_not_graded_correct")
        for position, found in enumerate(judged.trace.blocks):
            if found.action == "critique" and judged.true_verdict(position) is not True:
                raise Refused("verdict_not_true")
        return Example(kind, self.text, tuple(self.unlearned))


def critique_body(
    suite: Suite | None, question: str, attempt: str, wrong_step: int | None, steps: Sequence[str]
) -> str:
    """What a critique says before its verdict: the suite's own check, else a sentence that names the step.

    Raises Refused where the suite's check and the verdict disagree.
    """
    if suite is not None and suite.check is not None:
        check = suite.check(question, attempt)
        if check is None or check.holds != (wrong_step is None):
            raise Refused("check_disagrees")
        return check.text
    if wrong_step is None:
        return f"Each of the {len(steps)} steps holds."
    return f"Step {wrong_step} does not hold: {' '.join(steps[wrong_step - 1].split())}"


def _says(text: str, answer: str) -> bool:
    """Whether an answer stands in a text as a word of its own."""
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?![\w.])", text) is not None


def write(
    kind: str,
    demonstration: Demonstration,
    wrongs: Sequence[Wrong],
    confirm: bool,
    settings: TraceSynthesis,
    suite: Suite | None = None,
) -> Example:
    """A trace of a kind from a demonstration and its wrong attempts (1 for a fix, 2 for two). Raises Refused.

    Of two wrong attempts the second one's steps before its first wrong step must begin with those of the first: the
    refinement that is wrong again continues from there. `confirm` adds a last critique that finds the end correct.
    """
    writer = _Writer(demonstration, settings, suite)
    if kind in ("plain", "confirm"):
        writer.add("reason", demonstration.response)
        if kind == "confirm":
            writer.critique(demonstration.response, None, demonstration.steps)
        return writer.finished(kind)
    kept = 0
    for number, wrong in enumerate(wrongs):
        writer.wrong_attempt("refine" if number else "reason", wrong, kept)
        writer.critique(wrong.response, wrong.bad_step, wrong.steps)
        kept = wrong.bad_step - 1
    last = wrongs[-1]
    writer.add("refine", last.repair.rstrip("\n"))
    if confirm and len(parse(writer.text).blocks) < MAX_BLOCKS - 1:
        whole = "".join(last.steps[:kept]) + last.repair
        writer.critique(whole, None, whole.strip().split("\n")[:-1])
    return writer.finished(kind)


def corrupt_step(generator: random.Random, step: str) -> str | None:
    """A step with its last number moved by 1 to 9, or its operator swapped; None for one without number or operator."""
    numbers = list(_NUMBER.finditer(step))
    operators = list(_OPERATOR.finditer(step))
    ways = (["number"] if numbers else []) + (["operator"] if operators else [])
    if not ways:
        return None
    if generator.choice(ways) == "number":
        match = numbers[-1]
        value = int(match[0])
        moved = value + generator.choice([d for d in range(-9, 10) if d and value + d >= 0])
        return f"{step[: match.start()]}{moved}{step[match.end() :]}"
    match = generator.choice(operators)
    other = generator.choice([o for o in "+-*/" if o != match[1]])
    return f"{step[: match.start(1)]}{other}{step[match.end(1) :]}"


def corrupted(
    generator: random.Random, demonstration: Demonstration, others: Sequence[str], suite: Suite | None
) -> Wrong | None:
    """A wrong attempt that knows its error's place: the suite's own mistake, or one step spoilt or dropped.

    The generic one ends after the spoilt step with another answer (one of `others`, the answers of other
    demonstrations), since what would follow from it is not known. None where nothing can be spoilt.
    """
    if suite is not None and suite.mistake is not None:
        made = suite.mistake(generator, demonstration.question)
        steps = tuple(line + "\n" for line in made.rationale.split("\n"))
        repair = "".join(demonstration.steps[made.step - 1 :]) + demonstration.tail
        return Wrong(steps, f"{MARKER}{made.answer}", made.step, repair)
    steps = demonstration.steps
    answers = sorted({answer for answer in others if answer != demonstration.answer})
    if not steps or not answers:
        return None
    place = generator.randrange(len(steps))
    spoilt = corrupt_step(generator, steps[place])
    if place + 1 < len(steps) and (spoilt is None or generator.random() < 0.2):
        spoilt = steps[place + 1]  # the step itself is dropped
    if spoilt is None:
        return None
    kept = (*steps[:place], spoilt if spoilt.endswith("\n") else f"{spoilt}\n")
    repair = "".join(steps[place:]) + demonstration.tail
    return Wrong(kept, f"{MARKER}{generator.choice(answers)}", place + 1, repair)


def choose_kind(generator: random.Random, settings: TraceSynthesis) -> str:
    """A kind of trace by the shares of the mix."""
    mix = settings.mix
    return generator.choices(
        ("plain", "confirm", "fix", "two_fixes"), (mix.plain, mix.confirm, mix.fix, mix.two_fixes)
    )[0]


def continues(first: Wrong, second: Wrong) -> bool:
    """Whether a refinement after `first` may be `second`: the same steps before the first wrong one, other answers."""
    kept = first.bad_step - 1
    return second.bad_step > kept and second.steps[:kept] == first.steps[:kept] and first.response != second.response


def data_card(examples: Sequence[Example], refused: Counter[str], settings: TraceSynthesis) -> dict[str, Any]:
    """Counts of the traces by kind, of their verdicts and actions, of the refused ones by filter."""
    kinds = Counter(example.kind for example in examples)
    traces = [parse(example.text) for example in examples]
    actions = Counter(b.action for trace in traces for b in trace.blocks)
    verdicts = Counter("correct" if b.correct else "wrong" for t in traces for b in t.blocks if b.action == "critique")
    characters = sum(len(example.text) for example in examples)
    unlearned = sum(end - start for example in examples for start, end in example.unlearned)
    return {
        "mode": settings.mode,
        "wrong_content": settings.wrong_content,
        "traces": len(examples),
        "kinds": dict(sorted(kinds.items())),
        "actions": dict(sorted(actions.items())),
        "verdicts": dict(sorted(verdicts.items())),
        "refused": dict(sorted(refused.items())),
        "characters": characters,
        "unlearned_characters": unlearned,
    }


def rows(examples: Sequence[tuple[Demonstration, Example]]) -> list[dict[str, Any]]:
    """Rows of the table traces."""
    import json

    return [
        {
            "item_id": demonstration.item_id,
            "kind": example.kind,
            "question": demonstration.question,
            "text": example.text,
            "unlearned": json.dumps(example.unlearned),
            "answer": demonstration.answer,
            "answer_kind": demonstration.answer_kind,
        }
        for demonstration, example in examples
    ]
