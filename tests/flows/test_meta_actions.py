"""Settings of meta-actions: what arms may change, what does not go together, the preset and the study."""

import pytest

from data.errors import UserError
from flows import config, preflight
from flows.pipeline import pieces, reasoning_of
from flows.plan import steps
from flows.study import load_study

PRESET = "tiny-metaact"


def test_the_preset_makes_traces_before_the_warm_up():
    settings = config.load(PRESET)
    names = [name for name, _ in steps(settings)]
    assert names.index("traces totals") < names.index("warm-up totals")
    assert "<reason>" in pieces(settings) and pieces(config.load("tiny")) == ()
    outcome = config.arm_settings(settings, "totals", "outcome").reasoning
    metaact = config.arm_settings(settings, "totals", "metaact").reasoning
    assert outcome.restarts.share == 0 and metaact.restarts.share == 0.3
    assert outcome.synthesis == metaact.synthesis
    assert reasoning_of(settings.experts["totals"], None).kind == "plain"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"arms": {"metaact": {"reasoning": {"kind": "plain"}}}}, "kind and synthesis belong to the warm-up"),
        ({"arms": {"metaact": {"reasoning": {"synthesis": {"traces": 5}}}}}, "kind and synthesis belong"),
        ({"reasoning": {"reward": {"lenght": {}}}}, "did you mean 'length'"),
        ({"reward": {"partial": 0.6}}, "a correct trace of meta-actions may be worth only"),
        ({"reward": {"difficulty_weight": "linear"}}, "difficulty_weight"),
        ({"rl": {"advantage": {"kind": "group_mean_std"}}}, "divides by a standard deviation"),
        ({"rl": {"train_truncated": False}}, "train_truncated false hides traces"),
        ({"reasoning": {"synthesis": {"mix": {"plain": 0.9}}}}, "must add up to 1"),
        ({"reasoning": {"kind": "meta"}}, "there is no kind 'meta'"),
    ],
)
def test_wrong_settings_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        config.load(PRESET, overrides)


def test_programs_are_refused_before_anything_starts():
    source = {"kind": "suite", "suite": "program_words"}
    settings = config.load(PRESET, {"experts": {"totals": {"source": source}}})
    assert any("answered by programs" in problem for problem in preflight.problems(settings))


def test_composition_of_tagged_experts_is_refused():
    other = {"source": {"kind": "suite", "suite": "sign_totals"}}
    overrides = {"experts": {"other": other}, "composition": {"enabled": True, "arm": "metaact"}}
    with pytest.raises(UserError, match="composition learns gates on plain demonstrations"):
        config.load(PRESET, overrides)


def test_the_study_turns_one_ingredient_on_at_a_time():
    study = load_study("meta_actions")
    arms = {name: study.reasoning(name, "subsets") for name in study.settings.arms}
    assert arms["a0"].kind == arms["a0-warmup"].kind == "plain"
    assert len({str(arm.synthesis) for name, arm in arms.items() if arm.kind == "meta_actions"}) == 1

    def on(name):
        reasoning = arms[name]
        length = reasoning.reward.length.mode != "off"
        choice = reasoning.regularisation.kl_coefficient > 0 and reasoning.reward.diversity > 0
        return length, choice, reasoning.restarts.share > 0

    assert [on(f"a{i}") for i in (2, 3, 4, 5, 6, 7, 8, 9)] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    ]
    assert arms["a10"].restarts.choose == "random" and not arms["a11"].restarts.balanced
    assert on("a6-r3") == on("a6") and len(study.run.experts) == 6
