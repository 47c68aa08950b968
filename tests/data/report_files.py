"""A small made-up run on disk: the tables that the report reads, with figures that its tests work out by hand."""

import json
import math
import random
from pathlib import Path

from data.artifacts import write_table
from data.report.request import CellFiles, IngestedTask, ReportRequest

TASKS = ("words", "programs", "tracking")
ARMS = ("plain_rl", "r3")
MODELS = {"base": 0.05, "warmup": 0.22, "plain_rl": 0.31, "r3": 0.42, "composed": 0.40}
STEPS = (
    "Each box holds 6 pens, so 4 boxes hold 4 * 6 = 24 pens.\n",
    "Ana gives away 9 pens: 24 - 9 = 15.\n",
    "Then she buys 5 more: 15 + 5 = 20.\n",
    "Half of them are blue: 20 / 2 = 10.\n",
)
QUESTION = (
    "Ana has 4 boxes of 6 pens. She gives away 9 and buys 5 more. Half of what she has is blue. How many are blue?"
)


def evaluation(path: Path, model: str, task: str, correct: list[bool], **changed) -> Path:
    """evaluations.parquet of one model: question i is answered rightly where `correct[i]`."""
    rows = [
        {
            "model": model,
            "task": task,
            "benchmark": f"{task}-heldout",
            "split": "test",
            "item_id": f"{task}-{i}",
            "sample": 0,
            "question": QUESTION,
            "completion": "10" if right else "7",
            "completion_tokens": 1,
            "extracted": "10" if right else None,
            "gold": "10",
            "answer_kind": "number",
            "correct": right,
            "reason": "equal" if right else "no answer",
            "stop_reason": "eos" if right else "length",
            **changed,
        }
        for i, right in enumerate(correct)
    ]
    write_table(path, "evaluations", rows)
    return path


def metrics(path: Path, rounds: int, tokens: int, start: float, end: float, stages: int) -> Path:
    """metrics.parquet with an accuracy that rises from `start` to `end`, in `rounds` rounds of `tokens` tokens."""
    noise = random.Random(str(path.parent))
    shared = {"step": 0, "round": None, "generated_tokens_so_far": 0}
    rows = [shared | {"name": "validation_accuracy", "value": start * 0.9}]
    for number in range(rounds):
        level = start + (end - start) * (1 - math.exp(-3 * number / rounds))
        values = {"reward": level + noise.gauss(0, 0.03), "accuracy": level, "loss": 0.1}
        for stage in range(stages):
            values[f"accuracy/stage_{stage}"] = min(1.0, level * (0.7 + 0.3 * stage) + noise.gauss(0, 0.02))
        if number % 5 == 4:
            values["validation_accuracy"] = level * 0.9
        rows += [
            {"step": number, "name": k, "value": v, "round": number, "generated_tokens_so_far": (number + 1) * tokens}
            for k, v in values.items()
        ]
    write_table(path, "metrics", rows)
    return path


def start_states(path: Path, task: str, stages: int) -> Path:
    """start_states.parquet: one demonstration, revealed by `stage` steps."""
    rows = [
        {
            "item_id": f"{task}-demo",
            "start_state_id": f"{task}-demo-{stage}",
            "task": task,
            "stage": stage,
            "n_stages": stages,
            "revealed_steps": stage,
            "total_steps": 4,
            "question": QUESTION,
            "prefix": "".join(STEPS[:stage]),
            "remainder": "".join(STEPS[stage:]),
            "answer": "10",
            "answer_kind": "number",
        }
        for stage in range(stages)
    ]
    write_table(path, "start_states", rows)
    return path


def rollouts(path: Path, task: str, stages: int, written: str | None = None) -> Path:
    """rollouts.parquet: a right and a wrong sample at each stage; `written` replaces what the policy wrote."""
    rows = []
    for stage in range(stages):
        for sample, right in enumerate((True, False)):
            rest = "".join(STEPS[stage:]) if right else "Half of 14 is 7.\nThe answer is 7"
            rows.append(
                {
                    "item_id": f"{task}-demo",
                    "start_state_id": f"{task}-demo-{stage}",
                    "stage": stage,
                    "group": 2 * stage + sample,
                    "sample": sample,
                    "prompt_ids": [1, 2, 3],
                    "prefix_length": stage,
                    "completion_ids": list(range(20)),
                    "stop_reason": "eos" if right else "length",
                    "completion": "".join(STEPS[:stage]) + (rest if written is None else written),
                    "correct": right,
                    "parsed": "10" if right else "7",
                    "reason": "equal" if right else "another number",
                    "reward": 1.0 if right else 0.0,
                    "advantage": 0.5 if right else -0.5,
                    "policy_version": 9,
                    "seed": 2**63 + stage,
                }
            )
    write_table(path, "rollouts", rows)
    return path


def ingested(folder: Path, task: str) -> IngestedTask:
    """An ingestion folder: 100 demonstrations, 20 held-out questions, 3 rejected rows."""
    folder.mkdir(parents=True)
    write_table(
        folder / "demonstrations.parquet",
        "demonstrations",
        [{"task": task, "item_id": str(i), "split": "train" if i < 80 else "validation"} for i in range(100)],
    )
    write_table(
        folder / "questions.parquet",
        "questions",
        [{"task": task, "item_id": str(i), "split": "validation"} for i in range(80, 100)],
    )
    write_table(
        folder / "rejected.parquet",
        "rejected",
        [
            {"source": "a.jsonl", "row_number": row, "reason": reason, "message": message, "raw": "{}"}
            for row, reason, message in (
                (4, "no_answer", "row 4: 'answer' is empty"),
                (9, "no_answer", "row 9: 'answer' is empty"),
                (7, "duplicate", "row 7 repeats row 2"),
            )
        ],
    )
    return IngestedTask(task=task, folder=folder, start_states=start_states(folder / "start_states.parquet", task, 4))


def importance(path: Path, tasks: tuple[str, ...], ranks: int = 32) -> Path:
    """importance.parquet: geometrically falling values, each task's own ranks first."""
    rows = []
    for i, task in enumerate(tasks):
        for rank in range(ranks * len(tasks)):
            source = tasks[rank // ranks]
            value = 0.9 ** (rank % ranks) * (1.0 if source == task else 0.15 + 0.05 * i)
            rows.append(
                {
                    "task": task,
                    "module": "layers.0.q_proj",
                    "rank": rank,
                    "source": source,
                    "measure": "gate gradient",
                    "value": value,
                    "gate": 1.0 if value > 0.2 else 0.0,
                }
            )
    write_table(path, "importance", rows)
    return path


def cell(folder: Path, task: str, arm: str, seed: int = 0, rounds: int = 60) -> CellFiles:
    """A trained cell; plain_rl starts from the question only."""
    folder.mkdir(parents=True)
    stages = 1 if arm == "plain_rl" else 4
    result = {"round": rounds - 1, "rounds": rounds, "generated_tokens": 3340 * rounds, "validation_accuracy": 0.5}
    result |= {"warmup_validation_accuracy": 0.2, "last_validation_accuracy": 0.4, "accuracy_by_stage": {"0": 0.3}}
    (folder / "result.json").write_text(json.dumps(result))
    start, end = (0.1, 0.35) if arm == "plain_rl" else (0.22, 0.62)
    return CellFiles(
        task=task,
        arm=arm,
        seed=seed,
        folder=folder,
        metrics=metrics(folder / "metrics.parquet", rounds, 3340, start, end, stages),
        rollouts=rollouts(folder / "rollouts.parquet", task, stages),
        start_states=start_states(folder / "start_states.parquet", task, stages),
    )


def whole_run(root: Path) -> ReportRequest:
    """Three tasks, two arms, five models, a composition."""
    draw = random.Random(7)
    (root / "evaluation").mkdir(parents=True)
    evaluations = []
    for task in TASKS:
        for model, level in MODELS.items():
            correct = [draw.random() < level for _ in range(200)]
            evaluations.append(evaluation(root / "evaluation" / f"{model}-{task}.parquet", model, task, correct))
    return ReportRequest(
        run_name="tiny",
        settings={
            "name": "tiny",
            "seed": 0,
            "model": {"kind": "tiny", "hidden_size": 96, "layers": 3},
            "engine": {"kind": "vllm_server", "urls": ["http://user:secret@127.0.0.1:8000"]},
            "experts": {task: {"rl": {"prompts": 16, "samples": 8, "temperature": 0.6}} for task in TASKS},
        },
        ingestion=tuple(ingested(root / "demonstrations" / task, task) for task in TASKS),
        evaluations=tuple(evaluations),
        cells=tuple(cell(root / "experts" / task / arm, task, arm) for task in TASKS for arm in ARMS),
        importance=importance(root / "importance.parquet", TASKS),
        composed_arm="r3",
        generated={"composed": {task: 200_400 for task in TASKS}},
        versions={"torch": "2.13.0", "ratchet": "0.1.0"},
        root=root,
    )
