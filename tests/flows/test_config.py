"""Settings: layers, kinds, errors that name field, reason and remedy."""

import pytest

from data.errors import UserError
from flows import config
from flows.plan import print_plan, sizes, steps


@pytest.mark.parametrize("preset", config.preset_names())
def test_every_preset_parses_and_plans(preset, capsys):
    settings = config.load(preset)
    assert settings.name == preset
    print_plan(settings)
    printed = capsys.readouterr().out
    for step, _ in steps(settings):
        assert step in printed
    assert dict(sizes(settings))["parameters of the base"]
    assert config.preset_description(preset)


def test_the_later_layer_wins_and_shared_sections_reach_every_expert():
    settings = config.load("tiny", {"rl": {"prompts": 8}, "experts": {"state": {"rl": {"prompts": 12}}}})
    assert settings.experts["arithmetic"].rl.prompts == 8
    assert settings.experts["state"].rl.prompts == 12
    assert settings.experts["state"].rl.samples == settings.experts["arithmetic"].rl.samples


def test_another_kind_replaces_the_table_below_it():
    below = {"curriculum": {"kind": "mixed", "n_stages": 7}}
    assert config.merge(below, {"curriculum": {"kind": "none"}}) == {"curriculum": {"kind": "none"}}
    assert config.merge(below, {"curriculum": {"n_stages": 3}})["curriculum"] == {"kind": "mixed", "n_stages": 3}


def test_arms_lie_over_the_expert():
    settings = config.load("tiny")
    assert config.arm_settings(settings, "state", "plain_rl").curriculum.kind == "none"
    assert config.arm_settings(settings, "state", "r3").curriculum.kind == "mixed"
    with pytest.raises(UserError, match=r"arms\.r3\.rl\.prompt: there is no such setting; did you mean 'prompts'"):
        config.load("tiny", {"arms": {"r3": {"rl": {"prompt": 3}}}})


def test_a_resolved_settings_file_resolves_to_itself():
    settings = config.load("tiny")
    assert config.resolve(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("arguments", "nested"),
    [
        (["--rl.prompts", "16"], {"rl": {"prompts": 16}}),
        (["--rl.prompts=16", "--seed", "3"], {"rl": {"prompts": 16}, "seed": 3}),
        (["--curriculum.kind", "none"], {"curriculum": {"kind": "none"}}),
        (["--test", "null"], {"test": None}),
        (["--a.b", "[1, 2]"], {"a": {"b": [1, 2]}}),
        (["--a", "1e-4"], {"a": 1e-4}),
        (["--a", "true"], {"a": True}),
        (["--a", "Q: {question}"], {"a": "Q: {question}"}),
    ],
)
def test_overrides(arguments, nested):
    assert config.parse_overrides(arguments) == nested


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ({"rl": {"learning_rat": 1}}, ["rl.learning_rat:", "no such setting", "learning_rate"]),
        ({"rl": {"prompts": 1.5}}, ["rl.prompts:", "integer", "1.5", "whole number"]),
        ({"rl": {"temperature": -1}}, ["rl.temperature:", "greater than 0", "-1", "range"]),
        ({"curriculum": {"kind": "mixd"}}, ["curriculum.kind:", "'mixd'", "'mixed'"]),
        ({"curriculum": {"kind": "none", "n_stages": 3}}, ["curriculum.n_stages:", "no such setting"]),
        ({"experts": {"new": {}}}, ["experts.new.source:", "required", "--experts.new.source VALUE"]),
        ({"experts": {"New": {"source": {"kind": "suite", "suite": "x"}}}}, ["experts.New", "lower-case"]),
        ({"composition": {"arm": "nobody"}}, ["composition.arm", "'nobody'", "r3"]),
        ({"parameters": {"kind": "full"}}, ["composition.enabled", "lora"]),
        ({"model": {"kind": "tiny", "hiden_size": 3}}, ["model.hiden_size", "hidden_size"]),
        ({"name": "Not A Name"}, ["name:", "lower-case"]),
        ({"nonsense": 3}, ["nonsense:", "no such setting"]),
        (
            {"rl": {"loss": {"kind": "clipped_importance", "clip_low": 0.1}}},
            ["rl.loss.clip_low: there is no such setting with kind 'clipped_importance'; the settings", "cap, kind"],
        ),
        ({"rl": {"learning_rate": float("inf")}}, ["rl.learning_rate:", "finite number"]),
        ({"rl": {"kl": {"coefficient": float("inf")}}}, ["rl.kl.coefficient:", "finite number"]),
    ],
)
def test_errors_name_the_field_the_reason_and_the_remedy(overrides, fragments):
    with pytest.raises(UserError) as caught:
        config.load("tiny", overrides)
    message = str(caught.value)
    assert "\n" not in message, message
    for fragment in fragments:
        assert fragment in message, message


def test_a_file_that_is_no_toml_and_one_that_is_missing(tmp_path):
    (tmp_path / "x.toml").write_text("a = = 3")
    with pytest.raises(UserError, match="not TOML"):
        config.read_toml(tmp_path / "x.toml")
    with pytest.raises(UserError, match="does not exist"):
        config.read_toml(tmp_path / "y.toml")


@pytest.mark.parametrize("arguments", [["rl.prompts", "3"], ["--rl.prompts"], ["--rl.a", "1", "--rl.a.b", "2"]])
def test_malformed_overrides(arguments):
    with pytest.raises(UserError):
        config.parse_overrides(arguments)


def test_an_expert_or_an_arm_can_be_left_out():
    settings = config.load("tiny", config.parse_overrides(["--experts.state", "null", "--arms.plain_rl", "null"]))
    assert sorted(settings.experts) == ["arithmetic", "programs"] and sorted(settings.arms) == ["r3"]
