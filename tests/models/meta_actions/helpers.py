"""A tiny policy that knows the tags, traces of its vocabulary, and a cell of meta-actions."""

from pathlib import Path

from data.artifacts import write_table
from data.meta_actions.grammar import PIECES
from data.settings import MetaActions, NoCurriculum, PlainPrompt, RewardSettings
from models.pretraining import word_tokenizer
from models.requests import CellRequest, Device, PolicyFiles
from models.settings import EvaluationSettings, FullTraining, RLSettings, TransformersEngine
from tests.tiny import save_base, tiny_llama

CPU = Device(device="cpu", threads=1)


def tagged_base(folder: Path) -> PolicyFiles:
    """A base folder with a random Llama whose tokenizer holds each tag as one token."""
    tokenizer = word_tokenizer(sorted(PIECES))
    return PolicyFiles(base=save_base(folder, tiny_llama(vocabulary=len(tokenizer), context=320), tokenizer))


def demonstrations(path: Path, count: int = 12) -> Path:
    """demonstrations.parquet with sums of two steps."""
    rows = []
    for i in range(count):
        steps = [f"{i} + 1 = {i + 1}\n", f"{i + 1} + 2 = {i + 3}\n"]
        rows.append(
            {
                "task": "sums",
                "item_id": f"item{i:02}",
                "question": f"{i}+1+2?",
                "rationale": "".join(steps),
                "response": f"{''.join(steps)}#### {i + 3}",
                "answer": str(i + 3),
                "answer_kind": "number",
                "steps": steps,
                "source": "made",
                "row_number": i,
                "split": "validation" if i == 0 else "train",
            }
        )
    write_table(path, "demonstrations", rows)
    return path


def start_states(path: Path, count: int = 6) -> Path:
    """start_states.parquet with the questions of `demonstrations`."""
    rows = [
        {
            "item_id": f"item{i:02}",
            "start_state_id": f"item{i:02}/0",
            "task": "sums",
            "stage": 0,
            "n_stages": 1,
            "revealed_steps": 0,
            "total_steps": 2,
            "question": f"{i}+1+2?",
            "prefix": "",
            "remainder": f"{i} + 1 = {i + 1}\n{i + 1} + 2 = {i + 3}\n#### {i + 3}",
            "answer": str(i + 3),
            "answer_kind": "number",
        }
        for i in range(count)
    ]
    write_table(path, "start_states", rows)
    return path


def questions(path: Path, count: int = 3) -> Path:
    """questions.parquet with validation questions."""
    rows = [
        {
            "task": "sums",
            "benchmark": "held-out",
            "item_id": f"question{i}",
            "question": f"{i}+4?",
            "gold": str(i + 4),
            "answer_kind": "number",
            "split": "validation",
        }
        for i in range(count)
    ]
    write_table(path, "questions", rows)
    return path


def cell_request(folder: Path, base: PolicyFiles, warmup: Path, reasoning: MetaActions, **rl) -> CellRequest:
    """A cell of meta-actions from the question, in `folder`/cell."""
    values = {"prompts": 6, "samples": 4, "max_new_tokens": 90, "learning_rate": 3e-3, "validate_every": 50} | rl
    return CellRequest(
        url=str(folder / "cell"),
        key="key",
        base=base.base,
        warmup=warmup,
        parameters=FullTraining(),
        prompt=PlainPrompt(),
        curriculum=NoCurriculum(),
        reasoning=reasoning,
        reward=RewardSettings(),
        rl=RLSettings.model_validate(values),
        evaluation=EvaluationSettings(max_new_tokens=20),
        engine=TransformersEngine(),
        start_states=start_states(folder / "start_states.parquet"),
        questions=questions(folder / "questions.parquet"),
        seed=5,
        compute=CPU,
    )
