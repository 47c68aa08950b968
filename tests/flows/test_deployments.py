"""prefect.yaml: no key that Prefect would ignore, every deployment's flow and preset exist."""

import importlib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from flows import config

FILE = Path(__file__).resolve().parents[2] / "prefect.yaml"


class Strict(BaseModel):
    """Prefect ignores a deployment's unknown keys: a mistyped one must fail here."""

    model_config = ConfigDict(extra="forbid")


class WorkPool(Strict):
    name: str
    work_queue_name: str | None = None
    job_variables: dict[str, Any] = {}


class ConcurrencyLimit(Strict):
    limit: int
    collision_strategy: str


class Deployment(Strict):
    name: str
    entrypoint: str
    description: str
    tags: list[str]
    parameters: dict[str, Any]
    enforce_parameter_schema: bool
    work_pool: WorkPool
    concurrency_limit: ConcurrencyLimit


def test_prefect_yaml_holds_no_unknown_key_and_names_what_exists():
    content = yaml.safe_load(FILE.read_text())
    assert set(content) == {"name", "prefect-version", "build", "push", "pull", "deployments"}
    for entry in content["deployments"]:
        deployment = Deployment.model_validate(entry)
        path, function = deployment.entrypoint.split(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
        assert set(deployment.parameters) <= set(flow.parameters.properties)
        assert deployment.parameters["preset"] in config.preset_names()
