"""The key of a step, and which failures are tried again."""

from pathlib import Path

import pytest
from prefect.states import Completed, Failed

from data.errors import UserError
from data.settings import PlainPrompt, Settings
from data.storage import ArtifactRef
from models.requests import Device
from tasks.compute import MayPass, StepFailed
from tasks.steps import Inputs, artifact_key, may_pass, result_of, step_key


class Request(Settings):
    """A step with an input, a setting and a place to compute."""

    table: Path
    rate: float = 1.0
    compute: Device = Device()


def key(sha="aa", name="t.parquet", function="data.x:f", version=1, folder="/one", **fields):
    inputs = Inputs({Path(folder): ArtifactRef(folder, sha, "k", {})})
    return step_key(function, version, Request(table=Path(folder) / name, **fields), inputs)


def test_the_key_follows_content_settings_and_version_but_neither_place_nor_device():
    same = key()
    assert key(folder="/elsewhere") == same
    assert key(compute=Device(device="cuda", threads=9)) == same
    different = [key(sha="bb"), key(name="u.parquet"), key(rate=2.0), key(version=2), key(function="models.x:f")]
    assert len({same, *different}) == 6


def test_a_path_that_is_no_input_is_an_error():
    with pytest.raises(KeyError, match="in none of the inputs"):
        step_key("data.x:f", 1, Request(table=Path("/two/t")), Inputs({Path("/one"): ArtifactRef("", "a", "", {})}))


def test_library_versions_are_part_of_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr("tasks.steps.version", lambda name: "0.0")
    assert key() != before


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (MayPass("lost"), True),
        (ConnectionError(), True),
        (TimeoutError(), True),
        (UserError("row 3"), False),
        (StepFailed("bug"), False),
        (ValueError(), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error, again):
    assert may_pass(None, None, Failed(data=error)) is again


def test_a_found_output_is_a_state_and_a_made_one_is_not():
    assert result_of(3) == 3
    assert result_of(Completed(data=3)) == 3


def test_artifact_keys_are_lower_case_letters_digits_and_dashes():
    assert artifact_key("start states a_b/R3 0") == "start-states-a-b-r3-0"


def test_where_an_engine_is_reached_does_not_change_a_key():
    """A run whose server moved, or that allows it more time, finds its finished rounds again."""
    from models.requests import EvaluateRequest, PolicyFiles
    from models.settings import EvaluationSettings, TransformersEngine, VLLMServerEngine

    def key(engine):
        request = EvaluateRequest(
            policy=PolicyFiles(base=Path("/in/base")),
            model="base",
            prompt=PlainPrompt(),
            evaluation=EvaluationSettings(),
            engine=engine,
            questions=Path("/in/questions.parquet"),
        )
        inputs = Inputs({Path("/in"): ArtifactRef("/in", "hash", "key", {})})
        return step_key("models.evaluation:evaluate", 1, request, inputs)

    one = key(VLLMServerEngine())
    assert one == key(VLLMServerEngine(urls=("http://far:1", "http://off:2"), patience_seconds=1.0, concurrency=3))
    assert one != key(TransformersEngine())
    assert key(TransformersEngine()) != key(TransformersEngine(batch_size=3))
