"""Warm-up traces: wrong attempts from the policy's own rollouts, or spoilt demonstrations, made into traces.

Mode `rollouts`: attempts are sampled from a policy that was warmed up on the plain demonstrations; the first wrong step
of a wrong one is found by binary search over its prefixes with Monte-Carlo continuations, and a right continuation from
the step before it becomes the refinement. Mode `corrupt` needs no policy.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.grading import grade
from data.meta_actions.synthesis import (
    Demonstration,
    Example,
    Refused,
    Wrong,
    choose_kind,
    continues,
    corrupted,
    data_card,
    rows,
    write,
)
from data.progress import Report
from data.seeds import derive_seed
from data.segmentation import split_steps
from data.suites import SUITES
from models.meta_actions.tags import read_tags
from models.policy import Policy
from models.requests import TracesRequest
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.tokenization import boundary, decode, prompt_ids, sampled_offsets

LOST = 1 / 8
"""Share of right continuations up to which a prefix counts as lost."""
TRIES = 20
"""Draws of a second mistake that continues the first one, in mode corrupt."""


@dataclass
class Attempt:
    """A sampled attempt at a problem, and what its search has found."""

    problem: int
    ids: list[int]
    text: str
    correct: bool
    steps: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """How many of `ids` the first k steps are, k = 0 .. number of steps."""
    good: int = 0
    """The longest prefix that is known not to be lost, in steps."""
    bad: int = 0
    """The shortest prefix that is known to be lost, in steps."""
    repairs: dict[int, str] = field(default_factory=dict)
    """Steps kept → a right continuation after them."""

    @property
    def open(self) -> bool:
        """Whether the first wrong step is not found yet."""
        return self.bad - self.good > 1

    @property
    def middle(self) -> int:
        """The prefix to look at next, in steps."""
        return (self.good + self.bad) // 2


def synthesise(request: TracesRequest, out: Path, report: Report) -> dict[str, Any]:
    """Writes traces.parquet and data_card.json; returns the card.

    Raises UserError for answers that are programs, for a tokenizer that cannot tell the tags apart, and where no trace
    is left.
    """
    settings = request.reasoning.synthesis
    policy = Policy.load(request.policy, compute=request.compute)
    read_tags(policy.tokenizer)
    demonstrations = chosen_demonstrations(request)
    if settings.mode == "corrupt":
        wrongs = corrupt_all(demonstrations, request)
        spent = 0
    else:
        search = Search(request, policy, report)
        wrongs = search.run(demonstrations)
        spent = search.tokens
    found, refused = assemble(demonstrations, wrongs, request)
    if not found:
        reasons = ", ".join(f"{name} {count}" for name, count in refused.most_common(3))
        raise UserError(f"no demonstration became a warm-up trace ({reasons}); check reasoning.synthesis")
    card = data_card([example for _, example in found], refused, settings) | {
        "demonstrations": len(demonstrations),
        "generated_tokens": spent,
    }
    write_table(out / "traces.parquet", "traces", rows(found))
    (out / "data_card.json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")
    kinds = ", ".join(f"{name} {count}" for name, count in card["kinds"].items())
    report.log(f"{card['traces']} traces ({kinds}); {sum(refused.values())} refused")
    return card


def chosen_demonstrations(request: TracesRequest) -> list[Demonstration]:
    """The training split, at most `traces` of it by content hash."""
    table = sorted(read_rows(request.demonstrations, "demonstrations"), key=lambda row: row["item_id"])
    chosen = [row for row in table if row["split"] == "train"][: request.reasoning.synthesis.traces]
    if any(row["answer_kind"] == "program" for row in chosen):
        raise UserError(
            "reasoning.kind meta_actions needs answers that stand in a text, but these are results of programs; "
            "use reasoning.kind plain for this expert"
        )
    return [Demonstration.of_row(row) for row in chosen]


def corrupt_all(demonstrations: Sequence[Demonstration], request: TracesRequest) -> list[list[Wrong]]:
    """For each demonstration up to two wrong attempts, the second one continuing the first."""
    suite = SUITES.get(request.suite) if request.suite else None
    answers = [demonstration.answer for demonstration in demonstrations[:200]]
    found = []
    for demonstration in demonstrations:
        generator = random.Random(derive_seed(request.seed, "corrupt", demonstration.item_id))
        first = corrupted(generator, demonstration, answers, suite)
        wrongs = [first] if first is not None else []
        for _ in range(TRIES if wrongs else 0):
            second = corrupted(generator, demonstration, answers, suite)
            if second is not None and continues(first, second):
                wrongs.append(second)
                break
        found.append(wrongs)
    return found


def assemble(
    demonstrations: Sequence[Demonstration], wrongs: Sequence[Sequence[Wrong]], request: TracesRequest
) -> tuple[list[tuple[Demonstration, Example]], Counter[str]]:
    """One trace a demonstration, of a kind drawn by the mix, and how many each filter refused.

    Where a problem has too few wrong attempts for its kind the next simpler kind is written, and counted.
    """
    settings = request.reasoning.synthesis
    suite = SUITES.get(request.suite) if request.suite else None
    found, refused = [], Counter()
    for demonstration, available in zip(demonstrations, wrongs, strict=True):
        generator = random.Random(derive_seed(request.seed, "traces", demonstration.item_id))
        kind, confirm = choose_kind(generator, settings), generator.random() < settings.confirm_refined
        if kind == "two_fixes" and len(available) < 2:
            refused["no_second_wrong_attempt"] += 1
            kind = "fix"
        if kind == "fix" and not available:
            refused["no_wrong_attempt"] += 1
            kind = "confirm"
        needed = {"fix": 1, "two_fixes": 2}.get(kind, 0)
        try:
            found.append((demonstration, write(kind, demonstration, available[:needed], confirm, settings, suite)))
        except Refused as reason:
            refused[str(reason)] += 1
    return found, refused


class Search:
    """Samples attempts and finds the first wrong step of the wrong ones."""

    def __init__(self, request: TracesRequest, policy: Policy, report: Report) -> None:
        self.request = request
        self.settings = request.reasoning.synthesis
        self.policy = policy
        self.report = report
        self.engine = make_engine(request.engine, policy)
        self.tokens = 0
        """Tokens sampled so far."""
        self.prompts: list[list[int]] = []

    def run(self, demonstrations: Sequence[Demonstration]) -> list[list[Wrong]]:
        """For each demonstration up to two wrong attempts with their first wrong step and a repair."""
        tokenizer, prompt = self.policy.tokenizer, self.request.prompt
        self.prompts = [prompt_ids(tokenizer, d.question, prompt) for d in demonstrations]
        attempts = self.sample(demonstrations)
        wrong = [a for of_problem in attempts.values() for a in chosen_wrong(of_problem)]
        self.report.log(f"{len(wrong)} wrong attempts of {len(demonstrations)} problems are searched")
        for attempt in wrong:
            self.cut(attempt)
        wrong = [attempt for attempt in wrong if attempt.steps]
        while any(attempt.open for attempt in wrong):
            self.narrow([attempt for attempt in wrong if attempt.open], demonstrations)
        found: list[list[Wrong]] = [[] for _ in demonstrations]
        for attempt in wrong:
            made = self.wrong(attempt, attempts[attempt.problem], demonstrations[attempt.problem])
            before = found[attempt.problem]
            if made is not None and (not before or continues(before[0], made)):
                before.append(made)
        return found

    def sample(self, demonstrations: Sequence[Demonstration]) -> dict[int, list[Attempt]]:
        """Graded attempts by problem; those that hit the length limit are left out."""
        inputs, owners = [], []
        for number, demonstration in enumerate(demonstrations):
            for sample in range(self.settings.samples):
                seed = derive_seed(self.request.seed, "attempt", demonstration.item_id, sample)
                inputs.append(self.asked(self.prompts[number], seed))
                owners.append(number)
        found: dict[int, list[Attempt]] = defaultdict(list)
        for number, output in zip(owners, self.generate(inputs, "attempts"), strict=True):
            demonstration = demonstrations[number]
            text = decode(self.policy.tokenizer, output.completion_ids)
            if output.stop_reason != "eos" or not text.strip():
                continue
            correct = grade(text, demonstration.answer, demonstration.answer_kind).correct
            found[number].append(Attempt(number, output.completion_ids, text, correct))
        return found

    def asked(self, ids: list[int], seed: int) -> RolloutInput:
        """A request to continue `ids` as far as limit and context allow."""
        return RolloutInput(ids, seed, min(self.settings.max_new_tokens, self.policy.context - len(ids)))

    def generate(self, inputs: Sequence[RolloutInput], what: str) -> list[Any]:
        """What the engine samples, counted."""
        outputs = self.engine.generate(
            inputs, self.settings.temperature, progress=lambda done, total: self.report.progress(done, total, what)
        )
        self.tokens += sum(len(output.completion_ids) for output in outputs)
        return outputs

    def cut(self, attempt: Attempt) -> None:
        """Cuts an attempt into steps, the last of which holds its answer, at token boundaries."""
        attempt.steps = split_steps(attempt.text, self.request.segmentation)
        _, offsets = sampled_offsets(self.policy.tokenizer, attempt.ids)
        end, ends = 0, [0]
        for step in attempt.steps:
            end += len(step)
            ends.append(end)
        attempt.cuts = [boundary(offsets, characters) if characters else 0 for characters in ends]
        attempt.good, attempt.bad = 0, len(attempt.steps)

    def narrow(self, attempts: Sequence[Attempt], demonstrations: Sequence[Demonstration]) -> None:
        """One step of the binary search of all attempts at once."""
        count = self.settings.continuations
        inputs = []
        for attempt in attempts:
            ids = [*self.prompts[attempt.problem], *attempt.ids[: attempt.cuts[attempt.middle]]]
            name = demonstrations[attempt.problem].item_id
            seeds = [derive_seed(self.request.seed, "continuation", name, attempt.middle, i) for i in range(count)]
            inputs += [self.asked(ids, seed) for seed in seeds]
        outputs = self.generate(inputs, "continuations")
        for number, attempt in enumerate(attempts):
            demonstration = demonstrations[attempt.problem]
            kept = "".join(attempt.steps[: attempt.middle])
            prefix = attempt.ids[: attempt.cuts[attempt.middle]]
            right = []
            for output in outputs[number * count : (number + 1) * count]:
                text = decode(self.policy.tokenizer, [*prefix, *output.completion_ids])
                good = output.stop_reason == "eos" and text.startswith(kept)
                if good and grade(text, demonstration.answer, demonstration.answer_kind).correct:
                    right.append(text[len(kept) :])
            if len(right) <= LOST * count:
                attempt.bad = attempt.middle
            else:
                attempt.repairs[attempt.middle] = right[0]
                attempt.good = attempt.middle

    def wrong(self, attempt: Attempt, others: Sequence[Attempt], demonstration: Demonstration) -> Wrong | None:
        """The attempt with its first wrong step and a repair; None where no right continuation is known.

        The repair is a right rollout with the same steps before, else a right continuation of the search, else, where
        the very first step is wrong, the demonstration.
        """
        kept = attempt.bad - 1
        prefix = "".join(attempt.steps[:kept])
        sharing = [o.text[len(prefix) :] for o in others if o.correct and o.text.startswith(prefix)]
        repair = sharing[0] if sharing else attempt.repairs.get(kept)
        if repair is None and kept == 0:
            repair = demonstration.response
        if not repair or not repair.strip():
            return None
        return Wrong(tuple(attempt.steps), "", attempt.bad, repair)


def chosen_wrong(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The wrong attempts of a problem that are searched: the first two with different texts."""
    distinct = {attempt.text: attempt for attempt in reversed(attempts) if not attempt.correct}
    return list(reversed(distinct.values()))[:2]
