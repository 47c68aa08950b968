"""prefect.yaml: no key that Prefect would ignore, every deployment's flow and preset exist."""

import importlib
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import yaml
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows import config
from flows.setup import POOLS

FILE = Path(__file__).resolve().parents[2] / "prefect.yaml"


class Strict(BaseModel):
    """Prefect ignores a deployment's unknown keys: a mistyped one must fail here."""

    model_config = ConfigDict(extra="forbid")


class JobVariables(Strict):
    env: dict[str, str]


class WorkPool(Strict):
    name: str
    job_variables: JobVariables


class ConcurrencyLimit(Strict):
    limit: int
    collision_strategy: Literal["ENQUEUE", "CANCEL_NEW"]


class Schedule(Strict):
    """Time zone and slug are required: without them runs move with daylight saving, and a deploy ends a pause."""

    cron: str
    timezone: str
    slug: str
    active: bool


class Deployment(Strict):
    name: str
    entrypoint: str
    description: str
    tags: list[str]
    parameters: dict[str, Any]
    enforce_parameter_schema: Literal[True]
    work_pool: WorkPool
    concurrency_limit: ConcurrencyLimit | None = None
    schedules: list[Schedule] = []


class File(Strict):
    name: str
    prefect_version: str = Field(alias="prefect-version")
    build: None
    push: None
    pull: None
    definitions: dict[str, Any]
    deployments: list[Deployment]


def content() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def flow_of(deployment: Deployment) -> Flow:
    path, function = deployment.entrypoint.split(":")
    return getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)


DEPLOYMENTS = {f"{flow_of(entry).name}/{entry.name}": entry for entry in File.model_validate(content()).deployments}


def test_the_deployments_are_those_of_the_documentation():
    assert {
        "reasoning-pipeline/tiny",
        "expert-training/expert",
        "evaluation/run",
        "composition/run",
        "retraining/nightly",
    } <= set(DEPLOYMENTS)
    assert {entry.work_pool.name for entry in DEPLOYMENTS.values()} <= set(POOLS)


@pytest.mark.parametrize(("place", "key"), [((), "deployment"), (("deployments", 0), "shedules")])
def test_a_key_that_prefect_would_ignore_is_refused(place, key):
    changed = content()
    table = changed
    for part in place:
        table = table[part]
    table[key] = []
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        File.model_validate(changed)


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_a_deployments_parameters_fit_its_flow_and_its_form_explains_each(name):
    deployment = DEPLOYMENTS[name]
    flow = flow_of(deployment)
    schema = flow.parameters.model_dump_for_openapi()
    assert set(deployment.parameters) <= set(schema["properties"])
    required = set(schema.get("required", [])) - set(deployment.parameters)
    jsonschema.validate(deployment.parameters | dict.fromkeys(required, "x"), schema)
    for parameter, field in schema["properties"].items():
        assert len(field["description"]) > 15, parameter
        assert "default" in field or parameter in required, parameter
    if "preset" in schema["properties"]:
        assert schema["properties"]["preset"]["enum"] == config.preset_names()
    for word in ("tags", "description"):
        assert getattr(deployment, word)


def test_no_result_is_persisted_or_cached_by_prefect():
    """Results travel as manifests, in JSON: a pickle, or a hit on a file that is gone, cannot occur."""
    for deployment in DEPLOYMENTS.values():
        assert flow_of(deployment).persist_result is False
    tasks = [
        value
        for path in sorted((FILE.parent / "tasks").glob("*.py"))
        for value in vars(importlib.import_module(f"tasks.{path.stem}")).values()
        if isinstance(value, Task)
    ]
    assert len(tasks) > 10
    assert all(task.persist_result is False and task.cache_policy is NO_CACHE for task in tasks)


def test_parameters_are_small_whatever_the_preset():
    """Prefect refuses more than 512 kB; paths and settings are all that is sent."""
    for preset in config.preset_names():
        assert len(config.load(preset).model_dump_json()) < 50_000
