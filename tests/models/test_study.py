"""The warm-up's rule, success by stage and the calibration, on a random model and on policies that know the answer."""

import json

import pytest

from data.progress import Silent
from data.settings import PlainPrompt
from data.suites import SUITES
from models.calibration import calibrate
from models.policy import Policy
from models.rollout.engine import RolloutOutput
from models.settings import RLSettings, TransformersEngine
from models.stage_success import STAGES, Success, stage_success
from models.study import outside
from models.study_requests import CalibrationRequest, WarmupRule
from tests.rl import CPU, make_base

RULE = WarmupRule()


@pytest.mark.parametrize(
    "question, last, distance",
    [(0.02, 0.5, 0.0), (0.01, 0.6, 0.0), (0.0, 0.5, 1 / 3), (0.07, 0.5, 1.0), (0.02, 0.3, 0.5), (0.07, 0.7, 1.5)],
)
def test_distance_from_the_bands_counts_in_their_widths(question, last, distance):
    # answers may be right far more often: valid chains count
    found = {0: Success(0.9, question), STAGES - 1: Success(0.9, last)}
    assert outside(found, RULE) == pytest.approx(distance)


def test_where_chains_cannot_be_judged_right_answers_count():
    assert Success(0.25, None).counted == 0.25 and Success(0.25, 0.125).counted == 0.125


class Scripted:
    """An engine that always writes the same ids."""

    def __init__(self, ids):
        self.ids, self.asked = ids, []

    def generate(self, requests, temperature, progress=None):
        self.asked = requests
        return [RolloutOutput(self.ids, [0.0] * len(self.ids), "eos") for _ in requests]


def test_success_is_graded_on_prefix_and_completion_together(tmp_path):
    policy = Policy.load(make_base(tmp_path / "base"), compute=CPU)
    suite = SUITES["arithmetic_words"]
    [example] = suite.examples(1, 3, 2)
    steps = [line + "\n" for line in example.rationale.split("\n")]
    steps[-1] = steps[-1][:-1]
    row = {
        "item_id": "a",
        "question": example.question,
        "response": example.response,
        "steps": steps,
        "answer": example.answer,
        "answer_kind": "number",
    }
    last_step = example.response[len(steps[0]) :]
    engine = Scripted(policy.tokenizer(last_step, add_special_tokens=False)["input_ids"])
    options = {"prompt": PlainPrompt(), "temperature": 1.0, "max_new_tokens": 90, "seed": 0}
    found = stage_success(policy, engine, [row], {0: 2, STAGES - 1: 1}, suite="arithmetic_words", **options)
    assert found[STAGES - 1] == Success(1.0, 1.0)
    assert found[0] == Success(1.0, 0.0)  # the right answer without its first step
    assert len(engine.asked) == 3 and len({request.seed for request in engine.asked}) == 3
    assert stage_success(policy, engine, [row], {0: 1}, suite=None, **options)[0] == Success(1.0, None)


def test_calibration_writes_every_difficulty_and_names_the_least_outside(tmp_path):
    request = CalibrationRequest(
        base=make_base(tmp_path / "base").base,
        suites={"deduction": PlainPrompt()},
        difficulties=(1, 2),
        excluded=(),
        demonstrations=2,
        rule=WarmupRule(samples=1),
        rl=RLSettings(max_new_tokens=4),
        engine=TransformersEngine(),
        compute=CPU,
    )
    assert calibrate(request, tmp_path, Silent()) == {"deduction": "1"}  # a random model: both equally far
    levels = json.loads((tmp_path / "calibration.json").read_text())["deduction"]
    assert set(levels) == {"1", "2"} and levels["1"]["stage_0"] == [0.0, 0.0] and levels["1"]["outside"] > 0
