"""A step function of a study's own, as a user would write one."""

from pathlib import Path

from data.artifacts import write_table
from data.progress import Report
from models.evaluation import chosen_questions
from models.study_requests import StudyCellRequest


def knows_all(request: StudyCellRequest, out: Path, report: Report) -> dict:
    """Answers every question rightly, without a model."""
    questions = chosen_questions(request.demonstrations / "questions.parquet", request.split, request.limit)
    row = {"correct": True, "chain_valid": None, "completion_tokens": 1, "truncated": False}
    write_table(out / "answers.parquet", "study_answers", [{"question": n} | row for n in range(len(questions))])
    return {"accuracy": 1.0, "questions": len(questions), "said": request.options["say"]}
