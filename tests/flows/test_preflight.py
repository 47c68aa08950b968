"""What is refused before anything starts."""

import sys

import pytest

from data.errors import UserError
from flows import config, environment, preflight


@pytest.mark.parametrize(
    ("path", "message"),
    [("not_there_at_all:f", "cannot import"), ("my_rewards_here:g", "no callable g"), ("f", "package.module:function")],
)
def test_a_reward_function_that_is_not_there(tmp_path, monkeypatch, path, message):
    """Found before the warm-up, where the computing process looks: in the command's folder too."""
    (tmp_path / "my_rewards_here.py").write_text(
        "def f(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    good = config.load("tiny", {"root": str(tmp_path), "reward": {"functions": ["my_rewards_here:f"]}})
    assert preflight.problems(good) == []
    bad = config.load("tiny", {"root": str(tmp_path), "reward": {"functions": ["my_rewards_here:f", path]}})
    found = preflight.problems(bad)
    assert len(found) == len(bad.experts)
    assert all("reward.functions: reward function" in line and message in line for line in found)
    assert sys.path == before
    sys.modules.pop("my_rewards_here", None)


def test_the_folder_of_prefect_is_made_with_those_above_it_or_refused(tmp_path, monkeypatch):
    """Prefect makes no folders above its own, and waits for a database that cannot be."""
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path / "not/there/yet")})
    environment.prepare()
    assert (tmp_path / "not/there/yet").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path / "file/prefect")})
    with pytest.raises(UserError, match="PREFECT_HOME: "):
        environment.prepare()
