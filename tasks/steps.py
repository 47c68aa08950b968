"""What every step of a run shares: its key, the search for its finished output, the call to the computing process.

A step's output is a published folder (data.storage); its manifest holds the key: the settings it used, the hashes of
its inputs, the step's version and the versions of the libraries that change its numbers. A finished output with the
same key and intact files is not made again, whoever made it, on whatever machine.
"""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task, exponential_backoff
from pydantic import BaseModel

from data import storage
from data.artifacts import SCHEMA_VERSION, stable_hash
from data.settings import Settings
from data.storage import ArtifactRef
from models.requests import Device, Launch
from models.rollout import vllm_python
from tasks import compute, display
from tasks.api import if_reached
from tasks.compute import MayPass

PROGRESS_SECONDS = 3.0
LIBRARIES = {
    "data": ("pyarrow", "math-verify", "pydantic-monty"),
    "models": ("torch", "transformers", "peft", "math-verify", "pydantic-monty"),
}


class RunContext(Settings):
    """What a step needs to know of its run besides its own settings."""

    root: str
    name: str
    device: str = "auto"
    threads: int | None = None
    python: str | None = None
    """The Python of the computing process; None: this one."""
    mixed_precision: Literal["no", "bf16"] = "no"
    launch: Launch | None = None
    """How several processes are started; None: one process."""
    timeout: float
    """Seconds after which a step's computation is killed."""

    @property
    def compute(self) -> Device:
        """Where a step of this run computes."""
        return Device(device=self.device, threads=self.threads, mixed_precision=self.mixed_precision)

    def url(self, *parts: str) -> str:
        """A place inside the run's folder."""
        return storage.join(self.root, self.name, *parts)


def may_pass(task: Task, task_run: TaskRun, state: State) -> bool:
    """Whether a failed try is worth another: only what may pass is."""
    try:
        state.result()
    except (MayPass, ConnectionError, TimeoutError):
        return True
    except Exception:  # anything else would fail again, whatever it is
        return False
    return False


def step_task(run_name: str) -> Callable[[Callable[..., Any]], Task]:
    """A Prefect task for one step: retried with back-off for what may pass, never from Prefect's own cache."""
    return task(
        task_run_name=run_name,
        retries=2,
        retry_delay_seconds=exponential_backoff(backoff_factor=2),
        retry_jitter_factor=0.5,
        retry_condition_fn=may_pass,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


class TaskReport:
    """Sends a step's lines and progress to Prefect (log, progress artifact) and to the terminal."""

    def __init__(self, subject: str):
        self.subject = subject
        self._logger = get_run_logger()
        self._artifact: Any = None
        self._last = 0.0
        display.current().start(subject)

    def finish(self, how: str) -> None:
        """The step has ended: for the terminal, with the CPU seconds of its computation when it was done."""
        display.current().finish(self.subject, how)
        self._logger.info(how)

    def log(self, message: str) -> None:
        """One line for Prefect and the terminal."""
        self._logger.info(message)
        display.current().log(self.subject, message)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Progress for the terminal at once, for Prefect at most every `PROGRESS_SECONDS`."""
        display.current().progress(self.subject, done, total, text)
        if done < total and time.monotonic() - self._last < PROGRESS_SECONDS:
            return
        self._last = time.monotonic()
        percent, description = round(100 * done / max(total, 1e-9), 1), f"{self.subject}: {text}"
        if self._artifact is None:
            key = artifact_key(self.subject)
            self._artifact = if_reached(create_progress_artifact, percent, key=key, description=description)
        else:
            if_reached(update_progress_artifact, self._artifact, percent, description=description)


def artifact_key(text: str) -> str:
    """`text` as a key that Prefect accepts: lower-case letters, digits and dashes."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


class Inputs(dict[Path, ArtifactRef]):
    """The inputs of a step by their local folders."""

    def add(self, ref: ArtifactRef) -> Path:
        """Makes `ref` an input and returns its local folder, fetched where it lies elsewhere."""
        folder = storage.fetch(ref)
        self[folder] = ref
        return folder


WITHOUT_EFFECT = {
    **dict.fromkeys(("compute", "url", "key", "last_round", "tracking"), True),
    "engine": {
        *("urls", "adapter_folder", "concurrency", "row_timeout_seconds", "row_attempts", "patience_seconds"),
        *("python", "memory_share", "sleep", "max_rows"),
    },
}
"""Fields of a request that say where, when or in what portions to compute and who watches, not what."""


def step_key(function: str, step_version: int, request: BaseModel, inputs: Inputs, python: str | None = None) -> str:
    """The key of a step's output. `inputs` gives the local folder of each input.

    Paths of the request count as the content hash of the input they lie in; the device does not count. Versions are
    those of `python` where another Python computes.
    Raises KeyError for a path that lies in no input: its content would not be part of the key.
    """

    def canonical(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): canonical(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [canonical(item) for item in value]
        if isinstance(value, Path):
            for folder, ref in inputs.items():
                if value == folder or folder in value.parents:
                    return [ref.sha256, value.relative_to(folder).as_posix()]
            raise KeyError(f"{function}: {value} is in none of the inputs {[str(folder) for folder in inputs]}")
        return value

    names = LIBRARIES[function.split(".")[0]]
    libraries = {name: version(name) for name in names}
    if python is not None:
        found = vllm_python.find(python, "engine.python").versions
        libraries = {name: found[name] for name in (*names, *vllm_python.PACKAGES) if name in found}
    values = canonical(request.model_dump(exclude=WITHOUT_EFFECT))
    precision = getattr(getattr(request, "compute", None), "mixed_precision", "no")
    if precision != "no":  # what rounds otherwise has other numbers; devices and processes round alike
        values["mixed_precision"] = precision
    return stable_hash(function, step_version, SCHEMA_VERSION, libraries, values)


def run_step(
    subject: str,
    function: str,
    request: BaseModel,
    url: str,
    inputs: Inputs,
    run: RunContext,
    *,
    step_version: int = 1,
) -> ArtifactRef | State:
    """Makes the output of a step at `url`, or finds it there made already (a Completed state named Cached).

    Raises what `Compute.call` raises.
    """
    report = TaskReport(subject)
    key = step_key(function, step_version, request, inputs, run.python)
    found, reason = storage.find(url, key)
    if found is not None:
        report.finish("already complete")
        return Completed(name="Cached", message=f"already complete at {url}", data=found)
    if reason != "not made yet":
        report.log(f"made again: {reason}")
    try:
        with storage.staging(url) as folder:
            process = compute.shared(run.threads, run.python, run.launch)
            info = process.call(function, request, folder, report, run.timeout)
            made = storage.publish(folder, url, key, info)
    except BaseException:
        report.finish("failed")
        raise
    report.finish(f"done, {process.cpu_seconds:.1f} CPU s")
    return made


def configured(step: Task, retries: int, delay_seconds: float) -> Task:
    """`step` with the run's retries; each delay is twice the one before."""
    delays = [delay_seconds * 2**i for i in range(retries)]
    return step.with_options(retries=retries, retry_delay_seconds=delays or None)


def result_of(value: Any) -> Any:
    """The value of a called task, whether it was made or found (a state)."""
    return value.result() if isinstance(value, State) else value
