"""Sampled success from the start states of held-out demonstrations: where a policy stands in a reverse curriculum."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.artifacts import read_rows
from data.grading import grade
from data.seeds import derive_seed
from data.settings import Prompt
from data.start_states import revealed_steps
from data.suites import SUITES
from models.policy import Policy
from models.rollout.engine import RolloutEngine, RolloutInput
from models.tokenization import boundary, decode, encode_demonstration

STAGES = 5


class Success(NamedTuple):
    """Shares of samples: with the right answer, and right with a chain that checks out (None: cannot be judged)."""

    right: float
    valid: float | None

    @property
    def counted(self) -> float:
        """The share with valid chains where the task can judge them, else that of right answers."""
        return self.right if self.valid is None else self.valid


def held_out(demonstrations: Path, limit: int) -> list[dict[str, Any]]:
    """The first `limit` validation demonstrations in the order of their content hash."""
    rows = [row for row in read_rows(demonstrations, "demonstrations") if row["split"] == "validation"]
    return sorted(rows, key=lambda row: row["item_id"])[:limit]


def judge_chain(suite: str | None, question: str, text: str, correct: bool) -> bool | None:
    """Whether a right answer's chain checks out; None where no suite can tell."""
    if suite is None:
        return None
    return bool(correct and SUITES[suite].check_chain(question, text))


def stage_success(
    policy: Policy,
    engine: RolloutEngine,
    rows: Sequence[dict[str, Any]],
    samples: dict[int, int],
    *,
    prompt: Prompt,
    suite: str | None,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> dict[int, Success]:
    """Success by stage (of STAGES; 0 starts from the question) over `rows` of the table demonstrations.

    `samples`: stage → samples a demonstration. The draws depend on `seed`, demonstration, stage and sample alone.
    Demonstrations that do not fit the context are left out.
    """
    inputs, asked = [], []
    for row in rows:
        encoded = encode_demonstration(policy.tokenizer, row["question"], row["response"], prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) > policy.context:
            continue
        cuts = revealed_steps(len(row["steps"]), STAGES)
        for stage, count in samples.items():
            cut = boundary(encoded.offsets[:-1], len("".join(row["steps"][: cuts[stage]])))
            prefix = encoded.response_ids[:cut]
            ids = encoded.prompt_ids + prefix
            for sample in range(count):
                drawn = derive_seed(seed, "stage", row["item_id"], stage, sample)
                inputs.append(RolloutInput(ids, drawn, min(max_new_tokens, policy.context - len(ids))))
                asked.append((row, stage, prefix))
    outputs = engine.generate(inputs, temperature)
    found: dict[int, list[tuple[bool, bool | None]]] = {stage: [] for stage in samples}
    for (row, stage, prefix), output in zip(asked, outputs, strict=True):
        text = decode(policy.tokenizer, [*prefix, *output.completion_ids])
        correct = grade(text, row["answer"], row["answer_kind"]).correct
        found[stage].append((correct, judge_chain(suite, row["question"], text, correct)))
    return {stage: _shares(results) for stage, results in found.items() if results}


def _shares(results: Sequence[tuple[bool, bool | None]]) -> Success:
    right = sum(correct for correct, _ in results) / len(results)
    valid = [chain for _, chain in results if chain is not None]
    return Success(right, sum(valid) / len(valid) if valid else None)
