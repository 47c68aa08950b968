"""Every metric that rounds write is explained in docs/metrics.md, and nothing else is."""

from unittest.mock import Mock

from data.artifacts import read_rows
from data.progress import Silent
from data.settings import MixedCurriculum, PlainPrompt, RewardSettings
from models.cell import run_rounds
from models.policy import Policy
from models.requests import CellRequest
from models.rounds import write_round
from models.settings import EvaluationSettings, RLSettings, TransformersEngine
from tests.documented import ROUNDS, documented, general, lines
from tests.rl import CPU, LORA, make_base, write_questions, write_start_states


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
    assert written == documented(*ROUNDS)


def test_every_metric_has_a_unit_a_meaning_and_a_bad_value():
    for cells in [*lines(), *lines(log=True)]:
        assert len(cells) == 4 and all(cells), cells


def test_what_a_researcher_looks_for_is_there():
    wanted = """reward reward/<part> accuracy/stage_<i> zero_variance_share kl_reference kl_old entropy clip_share_low
    clip_share_high engine_logprob_difference_mean engine_logprob_difference_max gradient_norm completion_tokens_mean
    completion_tokens_max truncated_share explained_variance generated_tokens""".split()
    assert set(wanted) <= documented(*ROUNDS)
    assert any(cells[0] == "`tokens per second`" for cells in lines(log=True))


def test_the_log_says_tokens_per_second(tmp_path):
    said = []
    report = Mock(log=said.append)
    request = Mock(round=3, generated_tokens_so_far=0)
    metrics = {"generated_tokens": 60.0, "accuracy": 0.5, "reward": 0.5}
    write_round(request, tmp_path, report, [], metrics, {}, 2.0)
    assert said == ["round 3: reward 0.500, accuracy 0.500, 60 tokens at 30/s"]
