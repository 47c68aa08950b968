"""README's commands for a Prefect server, as typed from a fresh clone; what a deployment run leaves in the UI."""

import json

import pytest

from tests.end_to_end.conftest import readme_commands

pytestmark = pytest.mark.prefect


def test_readmes_deployment_run_ends_completed_from_another_folder(deployed):
    root, printed = deployed
    assert readme_commands("A Prefect server")[-1].endswith("deployment run 'reasoning-pipeline/tiny' --watch")
    assert "Completed" in printed
    assert (root / "tiny-deployed" / "report" / "report.html").is_file()


def test_the_run_tells_its_story_in_artifacts(deployed, server):
    artifacts = server.artifacts()
    assert artifacts["tiny-deployed-accuracy"]["type"] == "table"
    assert "data:image/png;base64," in artifacts["tiny-deployed-report"]["data"]
    assert "```mermaid" in artifacts["tiny-deployed-report"]["data"]
    assert artifacts["tiny-deployed-samples"]["type"] == "markdown"
    assert artifacts["warm-up-programs"]["type"] == "progress" and artifacts["warm-up-programs"]["data"] == 100
    names = {run["name"] for run in server.post("task_runs/filter", {"limit": 200})}
    assert {"ingest-state", "rounds-state-r3-0-to-1", "evaluate-composed-programs", "report"} <= names


def test_evaluation_and_composition_go_on_from_the_run(deployed, server):
    root, _ = deployed
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
