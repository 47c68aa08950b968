"""Every metric that rounds write is explained in docs/metrics.md, and nothing else is."""

import re
from pathlib import Path

from data.artifacts import read_rows
from data.progress import Silent
from data.settings import MixedCurriculum, PlainPrompt, RewardSettings
from models.cell import run_rounds
from models.policy import Policy
from models.requests import CellRequest
from models.settings import EvaluationSettings, RLSettings, TransformersEngine
from tests.rl import CPU, LORA, make_base, write_questions, write_start_states

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    rows = [line.split("|")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def general(name: str) -> str:
    """`accuracy/stage_3` is documented as `accuracy/stage_<i>`, a reward part as `reward/<part>`."""
    name = re.sub(r"/stage_\d+$", "/stage_<i>", name)
    return "reward/<part>" if name.startswith("reward/") else name


def test_every_metric_is_explained(tmp_path):
    base = make_base(tmp_path / "base")
    Policy.load(base, LORA, CPU, trainable=True, seed=3).save(tmp_path / "warmup")
    written = set()
    kl = {"coefficient": 0.01}
    for number, algorithm in enumerate([{"kl": kl}, {"advantage": {"kind": "gae"}, "kl": kl | {"place": "reward"}}]):
        rl = {"prompts": 4, "samples": 2, "max_new_tokens": 4, "max_rounds": 1} | algorithm
        request = CellRequest(
            url=str(tmp_path / f"cell{number}"),
            key="key",
            base=base.base,
            warmup=tmp_path / "warmup",
            parameters=LORA,
            prompt=PlainPrompt(),
            curriculum=MixedCurriculum(n_stages=3),
            reward=RewardSettings(functions=("tests.rl:low_ids",)),
            rl=RLSettings.model_validate(rl),
            evaluation=EvaluationSettings(max_new_tokens=4),
            engine=TransformersEngine(),
            start_states=write_start_states(tmp_path / "start_states.parquet"),
            questions=write_questions(tmp_path / "questions.parquet"),
            seed=7,
            compute=CPU,
        )
        run_rounds(request, Silent())
        metrics = read_rows(tmp_path / f"cell{number}" / "result" / "metrics.parquet", "metrics")
        written |= {general(row["name"]) for row in metrics}
    assert written == documented()
