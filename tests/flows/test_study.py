"""Study files: what is checked before anything is computed."""

import subprocess

import pytest

from data.errors import UserError
from data.settings import SuiteSource
from flows import config
from flows.pipeline import corpus_source, may_be_met
from flows.study import Study, StudySettings, load_study, study_names
from models.settings import TinyLlama
from tests.flows.studies import SMALL


def study(**changes) -> Study:
    return Study(StudySettings.model_validate(config.merge(SMALL, changes)))


def test_a_study_is_a_runs_settings_with_arms_of_its_own():
    found = study()
    assert found.shape.tasks == ("sums", "rules") and found.shape.seeds == (1, 2)
    assert set(found.run.arms) == set(SMALL["arms"]) and not found.run.composition.enabled
    tuned = found.with_tuned({"adaptive": {"learning_rate": 0.5}})
    assert config.arm_settings(tuned, "sums", "adaptive").rl.learning_rate == 0.5
    assert config.arm_settings(tuned, "sums", "plain_rl").rl.learning_rate != 0.5
    assert config.arm_settings(tuned, "sums", "adaptive").curriculum.kind == "adaptive"
    assert found.settings.trials("adaptive_70") == () and len(found.settings.trials("longer")) == 2
    assert found.supervised("longer", "sums", {"learning_rate": 0.25}).warmup.learning_rate == 0.25


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"least_questions": 1000}, "12 test questions are fewer than least_questions"),
        ({"run": {"evaluation": {"max_new_tokens": 8}}}, "validation would cut chains"),
        ({"tuning": {"seed": 1}}, "is one of the study's seeds"),
        ({"tuning": {"tasks": ["nothing"]}}, "there is no task 'nothing'"),
        ({"tuning": {"tasks": []}}, "names no pilot task"),
        ({"tuning": {"trials": [{"learning_rat": 1}, {"learning_rate": 1}]}}, "learning_rat: there is no such setting"),
        ({"arms": {"longer": {"trials": [{"learning_rate": 1}]}}}, "the same number of trials"),
        ({"arms": {"adaptive_70": {"tuned_as": "base"}}}, "'base' is no arm with trials"),
        ({"comparisons": [{"name": "x", "first": "r9", "second": "base"}]}, "there is no arm 'r9'"),
        ({"arms": {"plain_rl": {"rl": {"prompts": "many"}}}}, "rl.prompts"),
    ],
)
def test_a_wrong_study_says_field_and_reason(changes, message):
    with pytest.raises((UserError, ValueError), match=message):
        study(**changes)


def test_a_study_must_be_committed_as_it_is(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text("x = 1\n")
    found = Study(StudySettings.model_validate(SMALL), file)
    assert found.commit() is None  # outside of any repository

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    with pytest.raises(UserError, match="commit it first"):
        found.commit()
    git("add", "study.toml")
    git("commit", "-qm", "study")
    assert len(found.commit()) == 40
    file.write_text("x = 2\n")
    with pytest.raises(UserError, match="committed before any test question is graded"):
        found.commit()


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_are_sound(name):
    found = load_study(name)
    assert len(found.settings.seeds) >= 3 and found.settings.least_questions >= 1000
    # A rule counts plain chains: a study of traces has none, and equal supervised tokens instead.
    tagged = any(expert.reasoning.kind == "meta_actions" for expert in found.run.experts.values())
    limits = {expert.warmup.max_tokens for expert in found.run.experts.values()}
    assert found.settings.comparisons
    assert None not in limits if tagged else found.settings.warmup_rule is not None


def test_an_unknown_study_is_an_error():
    with pytest.raises(UserError, match="there is no study 'nothing'"):
        load_study("nothing")


def test_a_base_with_difficulties_of_its_own_depends_on_no_tasks_difficulty():
    own, none = TinyLlama(pretrain_difficulties=(1, 2, 4)), TinyLlama()
    source = SuiteSource(suite="deduction", difficulty=3, demonstrations=7)
    assert corpus_source(own, source) == corpus_source(own, source.model_copy(update={"difficulty": 5}))
    assert corpus_source(none, source) == source
    assert not may_be_met(own, source) and may_be_met(none, source)
    assert may_be_met(own, source.model_copy(update={"difficulty": 4}))
    assert not may_be_met(own, SuiteSource(suite="deduction"))  # its default is 5
