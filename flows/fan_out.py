"""Experts of a run as runs of a deployment of their own, taken by any worker that shares the root URL."""

import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from data.errors import UserError
from tasks.api import patiently
from tasks.compute import MayPass

POLL_SECONDS = 2.0


def train_experts(
    deployment: str, tasks: Iterable[str], parameters: dict[str, Any], retries: int, log: Callable[[str], None]
) -> None:
    """Starts one run of `deployment` a task, with `parameters` and the task, and waits until all have completed.

    A run of the same tag that is still under way (of a parent that died) is waited for instead of started again. A run
    that crashed, its process or machine lost, is started again, `retries` times. Ends the runs that are under way when
    the wait is ended early. Raises UserError where there is no such deployment, and MayPass for runs that did not
    complete.
    """
    with get_client(sync_client=True) as client:
        _check(client, deployment)
        runs: dict[str, FlowRun] = {}
        tries = dict.fromkeys(tasks, 0)
        try:
            for task in tries:
                runs[task] = _under_way(client, _tag(parameters, task)) or _start(deployment, task, parameters)
                log(f"expert {task}: run {runs[task].name} of {deployment}")
            while not all(_completed(run) for run in runs.values()):
                time.sleep(POLL_SECONDS)
                for task in tries:
                    runs[task] = patiently(client.read_flow_run, runs[task].id)
                    state = runs[task].state
                    if state is None or not state.is_final() or state.is_completed():
                        continue
                    if not state.is_crashed() or tries[task] >= retries:
                        raise MayPass(f"expert {task}: run {runs[task].name} ended {state.name}: {state.message}")
                    tries[task] += 1
                    runs[task] = _start(deployment, task, parameters)
                    log(f"expert {task}: its run crashed ({state.message}); run {runs[task].name} goes on from there")
        except BaseException:
            _cancel(client, runs.values())
            raise


def _tag(parameters: dict[str, Any], task: str) -> str:
    return f"expert:{parameters['root']}/{parameters['name']}/{task}"


def _check(client: SyncPrefectClient, deployment: str) -> None:
    try:
        client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        raise UserError(
            f"compute.expert_deployment: the Prefect server has no deployment {deployment!r}; "
            "prefect --no-prompt deploy --all makes it"
        ) from None


def _start(deployment: str, task: str, parameters: dict[str, Any]) -> FlowRun:
    return patiently(
        run_deployment,
        deployment,
        parameters=parameters | {"task": task},
        timeout=0,
        tags=[_tag(parameters, task)],
        flow_run_name=f"{parameters['name']}-{task}",
    )


def _under_way(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    wanted = FlowRunFilter.model_validate(
        {"tags": {"all_": [tag]}, "state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING"]}}}
    )
    found = client.read_flow_runs(flow_run_filter=wanted, limit=1)
    return found[0] if found else None


def _completed(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_completed()


def _cancel(client: SyncPrefectClient, runs: Iterable[FlowRun]) -> None:
    for run in runs:
        identifier: UUID = run.id
        state = client.read_flow_run(identifier).state
        if state is None or not state.is_final():
            client.set_flow_run_state(identifier, Cancelling(message="the run that waits for it was ended"))
