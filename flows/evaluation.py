"""The flow `evaluation`: models of a run on held-out questions of one of its splits."""

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact

from flows.finished import FinishedRun, reasoning_of
from flows.parameters import Questions, RunName, Split
from tasks.api import patiently
from tasks.compute import close_shared
from tasks.evaluation import evaluate
from tasks.steps import artifact_key, configured, result_of


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    return f"{given.get('name')}-{given.get('split')}"


@flow(name="evaluation", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def evaluation(
    name: RunName = "tiny",
    root: str = "runs",
    models: list[str] | None = None,
    tasks: list[str] | None = None,
    split: Split = "test",
    limit: Questions | None = None,
) -> list[dict[str, str]]:
    """Answers and grades held-out questions with models of a run; answers that are there are not given again.

    Args:
        name: The run whose models answer.
        root: Folder of the runs, a path or any fsspec URL.
        models: base, warmup, an arm (plain_rl, r3, ...), composed or routed; empty means all that the run has.
        tasks: Which tasks; empty means all of the run.
        split: The questions: test is reported, validation chose the checkpoints, promotion decides on promotions.
        limit: At most this many questions a task, by content hash; empty means all.

    Returns:
        One row a task and model: accuracy, interval, questions.
    """
    run = FinishedRun(root, name)
    compute = run.settings.compute
    rows = []
    try:
        for task in run.tasks(tasks):
            for model in models or run.models():
                expert, weights = run.expert(task, model), run.weights(task, model)
                made = result_of(
                    configured(evaluate, compute.retries, compute.retry_delay_seconds)(
                        run.context,
                        model,
                        task,
                        run.output("base"),
                        weights,
                        run.output("demonstrations", task),
                        expert.prompt,
                        reasoning_of(expert, weights),
                        expert.evaluation,
                        run.settings.engine_of(model),
                        run.settings.seed,
                        split=split,
                        limit=limit,
                    )
                )
                rows.append(accuracy_row(task, model, made.info))
    finally:
        close_shared()
    key = artifact_key(f"{name} evaluation {split}")
    patiently(create_table_artifact, rows, key=key, description=f"Models of run {name} on the {split} questions")
    return rows


def accuracy_row(task: str, model: str, info: dict) -> dict[str, str]:
    """A row of an accuracy table as it is shown, from the figures of an evaluation."""
    shown = info.get("interval")
    return {
        "task": task,
        "model": model,
        "accuracy": f"{100 * info['accuracy']:.1f} %",
        "interval": f"[{100 * shown[0]:.1f}, {100 * shown[1]:.1f}] %" if shown else "several samples a question",
        "questions": str(info["questions"]),
        "no answer": f"{100 * info['no_answer_share']:.1f} %",
    }
