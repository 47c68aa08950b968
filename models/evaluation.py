"""Answers to held-out questions, graded: always from the question alone, on the same path as rollouts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.grading import Grade, grade, warm
from data.meta_actions.judging import judge
from data.progress import Report
from data.seeds import derive_seed
from data.settings import MetaActions, PlainReasoning, Prompt, Reasoning
from data.statistics import wilson
from models.policy import Policy
from models.requests import AnswerRequest, EvaluateRequest
from models.rollout.engine import RolloutEngine, RolloutInput
from models.rollout.engines import make_engine
from models.settings import EvaluationSettings
from models.tokenization import check_context, decode, prompt_ids


def chosen_questions(path: Path, split: str, limit: int | None) -> list[dict[str, Any]]:
    """Rows of the table `questions` in one split, in the order of their content hash, at most `limit` of them.

    Raises UserError where the split is empty.
    """
    rows = sorted(
        (row for row in read_rows(path, "questions") if row["split"] == split), key=lambda row: row["item_id"]
    )
    if not rows:
        raise UserError(
            f"{path} has no question in its split {split!r}; hold some out (splits.{split}) or name a benchmark"
        )
    return rows[:limit]


def room(policy: Policy, ids: Sequence[int], wanted: int, what: str) -> int:
    """How many tokens may be sampled after `ids`: `wanted`, or fewer where the context ends before.

    Raises UserError where not one fits: a prompt is never cut.
    """
    check_context(ids, 1, policy.context, what)
    return min(wanted, policy.context - len(ids))


def fitting_prompt(
    policy: Policy, row: dict[str, Any], prompt: Prompt, settings: EvaluationSettings
) -> tuple[list[int], int]:
    """The prompt's ids of a row of `questions`, and how many tokens may follow. Raises UserError where none may."""
    ids = prompt_ids(policy.tokenizer, row["question"], prompt)
    return ids, room(policy, ids, settings.max_new_tokens, f"question {row['item_id']} of {row['benchmark']}")


def answer_questions(
    policy: Policy,
    engine: RolloutEngine,
    questions: Sequence[dict[str, Any]],
    prompt: Prompt,
    settings: EvaluationSettings,
    *,
    model: str,
    seed: int,
    report: Report,
    reasoning: Reasoning = PlainReasoning(),  # noqa: B008 - frozen settings
) -> list[dict[str, Any]]:
    """`settings.samples` graded answers to each question, as rows of the table `evaluations`.

    A draw's seed depends on `seed`, the question and the sample's number: models are compared on common draws.
    Raises UserError for several greedy samples (they are all the same) and for a question over the context.
    """
    if settings.samples > 1 and settings.temperature == 0:
        raise UserError(
            f"evaluation.samples is {settings.samples} with evaluation.temperature 0: greedy answers are all the same; "
            "set a temperature, or samples to 1"
        )
    requests, asked = [], []
    for row in questions:
        ids, new = fitting_prompt(policy, row, prompt, settings)
        for sample in range(settings.samples):
            requests.append(RolloutInput(ids, derive_seed(seed, "evaluation", row["item_id"], sample), new))
            asked.append((row, sample))
    outputs = engine.generate(
        requests,
        settings.temperature,
        settings.stop_strings,
        progress=lambda done, total: report.progress(done, total, "answers"),
    )
    rows = []
    for number, ((row, sample), output) in enumerate(zip(asked, outputs, strict=True)):
        completion = decode(policy.tokenizer, output.completion_ids)
        verdict = graded(completion, row["gold"], row["answer_kind"], reasoning)
        rows.append(
            {key: row[key] for key in ("task", "benchmark", "split", "item_id", "subject", "question", "gold")}
            | {
                "model": model,
                "sample": sample,
                "completion": completion,
                "completion_tokens": len(output.completion_ids),
                "extracted": verdict.parsed,
                "answer_kind": row["answer_kind"],
                "correct": verdict.correct,
                "reason": verdict.reason,
                "stop_reason": output.stop_reason,
            }
        )
        report.progress(number + 1, len(requests), "graded answers")
    return rows


def graded(completion: str, gold: str, kind: str, reasoning: Reasoning) -> Grade:
    """The grade of an answer; of a trace of meta-actions its answer block counts, and only if the trace is legal."""
    if not isinstance(reasoning, MetaActions):
        return grade(completion, gold, kind)
    judged = judge(completion, gold, kind, reasoning.max_blocks)
    return Grade(judged.correct, judged.parsed, judged.reason)


def evaluate(request: EvaluateRequest, out: Path, report: Report) -> dict[str, Any]:
    """Answers and grades the questions of a split; writes `evaluations.parquet`.

    Returns counts, the accuracy over all samples with its Wilson interval (over questions where there is one sample
    each), shares of rows that were cut off by the limit or held no answer, and the number of sampled tokens.
    """
    questions = chosen_questions(request.questions, request.split, request.limit)
    warm({row["answer_kind"] for row in questions})
    policy = Policy.load(request.policy, compute=request.compute)
    engine = make_engine(request.engine, policy)
    report.log(f"{request.model}: {len(questions)} questions of the split {request.split!r}")
    rows = answer_questions(
        policy,
        engine,
        questions,
        request.prompt,
        request.evaluation,
        model=request.model,
        seed=request.seed,
        report=report,
        reasoning=request.reasoning,
    )
    write_table(out / "evaluations.parquet", "evaluations", rows)
    figures = accuracy(rows, request.evaluation.confidence)
    report.log(f"{request.model}: {figures['correct']} of {figures['answers']} correct")
    return figures


def accuracy(rows: Sequence[dict[str, Any]], confidence: float) -> dict[str, Any]:
    """Counts and shares over rows of the table `evaluations`, as JSON values."""
    correct = sum(row["correct"] for row in rows)
    stops = Counter(row["stop_reason"] for row in rows)
    figures: dict[str, Any] = {
        "questions": len({row["item_id"] for row in rows}),
        "answers": len(rows),
        "correct": correct,
        "accuracy": correct / len(rows),
        "truncated_share": stops["length"] / len(rows),
        "no_answer_share": sum(row["extracted"] is None for row in rows) / len(rows),
        "generated_tokens": sum(row["completion_tokens"] for row in rows),
    }
    if figures["questions"] == len(rows):
        estimate = wilson(correct, len(rows), confidence)
        figures["interval"] = [estimate.low, estimate.high]
    return figures


def answer(request: AnswerRequest, report: Report) -> dict[str, Any]:
    """Answers one question, continuing `prefix` where one is given.

    Returns completion (the text after the prefix), prefix, tokens and stop_reason.
    """
    policy = Policy.load(request.policy, compute=request.compute)
    engine = make_engine(request.engine, policy)
    prefix = policy.tokenizer(request.prefix, add_special_tokens=False)["input_ids"] if request.prefix else []
    ids = [*prompt_ids(policy.tokenizer, request.question, request.prompt), *prefix]
    new = room(policy, ids, request.evaluation.max_new_tokens, "the question")
    seed = derive_seed(0, "answer", request.question)
    settings = request.evaluation
    [output] = engine.generate([RolloutInput(ids, seed, new)], settings.temperature, settings.stop_strings)
    # Decoded together: some tokenizers drop the space in front of a text's first token.
    completion = decode(policy.tokenizer, [*prefix, *output.completion_ids])[len(decode(policy.tokenizer, prefix)) :]
    return {
        "prefix": request.prefix,
        "completion": completion,
        "tokens": len(output.completion_ids),
        "stop_reason": output.stop_reason,
    }
