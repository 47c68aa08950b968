"""README's commands for a Prefect server, as typed from a fresh clone; what a deployment run leaves in the UI."""

import json
import shlex

import pytest

from flows.config import parse_overrides
from tests.end_to_end.conftest import readme_commands
from tests.end_to_end.mini import ARGUMENTS

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory):
    """The run of README's last command, made small, typed in another folder."""
    root = tmp_path_factory.mktemp("root")
    overrides = json.dumps(parse_overrides(ARGUMENTS))
    small = f" --param root={root} --param {shlex.quote(f'overrides={overrides}')}"
    command = readme_commands("A Prefect server")[-1]
    assert command == ".venv/bin/prefect deployment run 'reasoning-pipeline/tiny' --watch"
    printed = server.typed(command + small, cwd=root, timeout=500)
    return root, printed


def test_readmes_deployment_run_ends_completed_from_another_folder(finished):
    root, printed = finished
    assert "Completed" in printed
    assert (root / "tiny-deployed" / "report" / "report.html").is_file()


def test_the_run_tells_its_story_in_artifacts(finished, server):
    artifacts = server.artifacts()
    assert artifacts["tiny-deployed-accuracy"]["type"] == "table"
    assert "data:image/png;base64," in artifacts["tiny-deployed-report"]["data"]
    assert "```mermaid" in artifacts["tiny-deployed-report"]["data"]
    assert artifacts["tiny-deployed-samples"]["type"] == "markdown"
    assert artifacts["warm-up-programs"]["type"] == "progress" and artifacts["warm-up-programs"]["data"] == 100
    names = {run["name"] for run in server.post("task_runs/filter", {"limit": 200})}
    assert {"ingest-state", "rounds-state-r3-0-to-1", "evaluate-composed-programs", "report"} <= names


def test_evaluation_and_composition_go_on_from_the_run(finished, server):
    root, _ = finished
    common = {"root": str(root), "name": "tiny-deployed"}
    server.run("evaluation/run", common | {"models": ["r3"], "tasks": ["state"], "split": "validation"})
    settings = {"importance_examples": 4, "gate_steps": 1, "batch_size": 4, "arm": "plain_rl"}
    server.run("composition/run", common | {"label": "plain", "tasks": ["state", "programs"], "settings": settings})
    artifacts = server.artifacts()
    [row] = json.loads(artifacts["tiny-deployed-evaluation-validation"]["data"])
    assert row["questions"] == "8" and row["model"] == "r3" and "[" in row["interval"]
    rows = json.loads(artifacts["tiny-deployed-plain"]["data"])
    assert [row["task"] for row in rows] == ["state", "programs"]
    run = root / "tiny-deployed"
    assert (run / "compositions" / "plain" / "exported" / "state" / "adapter_model.safetensors").is_file()
    assert (run / "evaluation" / "validation-all" / "r3" / "state" / "evaluations.parquet").is_file()
