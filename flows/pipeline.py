"""The flow `reasoning-pipeline`: demonstrations in, an evaluated, composed model out."""

import os
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from prefect import flow, runtime

from data import storage
from data.errors import UserError
from data.storage import ArtifactRef
from flows import config
from flows.settings import ExpertSettings, RunSettings
from tasks.base import base_model
from tasks.composition import compose
from tasks.compute import close_shared
from tasks.evaluation import evaluate
from tasks.ingestion import ingest
from tasks.report import report, report_artifacts
from tasks.rounds import run_cell
from tasks.start_states import start_states
from tasks.steps import RunContext, configured, result_of
from tasks.warmup import warm_up


def _flow_run_name() -> str:
    parameters = runtime.flow_run.parameters
    return str(parameters.get("name") or parameters.get("preset"))


@flow(name="reasoning-pipeline", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def reasoning_pipeline(
    preset: str = "tiny",
    name: str | None = None,
    root: str | None = None,
    seed: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> str:
    """Demonstrations become an evaluated, composed model; finished steps are never done again.

    Args:
        preset: The shipped settings to start from (`ratchet presets` lists them).
        name: The run's name; runs with the same name and settings continue each other.
        root: Folder of the runs, a path or any fsspec URL.
        seed: Seed of everything random.
        overrides: Any other setting, nested, as in a settings file: {"rl": {"generated_tokens": 50000}}.

    Returns:
        The URL of the report's folder.
    """
    given = {key: value for key, value in (("name", name), ("root", root), ("seed", seed)) if value is not None}
    settings = config.load(preset, overrides=config.merge(overrides or {}, given))
    if storage.is_local(settings.root):
        settings = settings.model_copy(update={"root": str(storage.local_path(settings.root).absolute())})
    try:
        with run_lock(settings):
            return Pipeline(settings).run()
    finally:
        close_shared()


class Pipeline:
    """The steps of one run in their order."""

    def __init__(self, settings: RunSettings):
        self.settings = settings
        compute = settings.compute
        self.context = RunContext(
            root=settings.root,
            name=settings.name,
            device=compute.device,
            threads=compute.threads,
            timeout=compute.step_timeout_seconds,
        )

    def call(self, task: Any, *arguments: Any, **named: Any) -> ArtifactRef:
        """Calls a step's task with the run's retries and returns the reference to its output."""
        compute = self.settings.compute
        return result_of(
            configured(task, compute.retries, compute.retry_delay_seconds)(self.context, *arguments, **named)
        )

    def run(self) -> str:
        """All steps; returns the URL of the report's folder."""
        settings = self.settings
        storage.write_json(self.context.url("settings.json"), settings.model_dump(mode="json"))
        demonstrations = {task: self.ingest(task, expert) for task, expert in settings.experts.items()}
        base = self.call(
            base_model,
            settings.model,
            [(e.source, e.prompt) for e in settings.experts.values() if e.source.kind == "suite"],
            list(demonstrations.values()),
            settings.seed,
        )
        models: dict[str, dict[str, tuple[ArtifactRef, str] | None]] = {"base": dict.fromkeys(demonstrations)}
        starts: dict[tuple[str, str], ArtifactRef] = {}
        cells: dict[tuple[str, str], ArtifactRef] = {}
        for task, expert in settings.experts.items():
            warmup = self.warm_up(task, expert, base, demonstrations[task])
            models.setdefault("warmup", {})[task] = (warmup, "weights")
            for arm in settings.arms:
                starts[task, arm], cells[task, arm] = self.train(task, arm, base, warmup, demonstrations[task])
                models.setdefault(arm, {})[task] = (cells[task, arm], "weights")
        composition = None
        if settings.composition.enabled and len(settings.experts) > 1:
            composition = self.compose(base, cells, demonstrations)
            models["composed"] = {task: (composition, f"exported/{task}") for task in demonstrations}
        evaluations = [
            self.evaluate(model, task, base, weights, demonstrations[task])
            for model, by_task in models.items()
            for task, weights in by_task.items()
        ]
        return self.report(demonstrations, starts, cells, composition, evaluations)

    def ingest(self, task: str, expert: ExpertSettings) -> ArtifactRef:
        """The task's demonstrations and held-out questions."""
        return self.call(
            ingest, task, expert.source, expert.splits, expert.segmentation, expert.answer_kind, expert.test
        )

    def warm_up(self, task: str, expert: ExpertSettings, base: ArtifactRef, demonstrations: ArtifactRef) -> ArtifactRef:
        """The task's supervised adapter, where every arm starts."""
        return self.call(
            warm_up,
            task,
            base,
            demonstrations,
            self.settings.parameters,
            expert.prompt,
            expert.warmup,
            self.settings.seed,
        )

    def train(
        self, task: str, arm: str, base: ArtifactRef, warmup: ArtifactRef, demonstrations: ArtifactRef
    ) -> tuple[ArtifactRef, ArtifactRef]:
        """The arm's start states and, after its rounds, its chosen checkpoint."""
        expert = config.arm_settings(self.settings, task, arm)
        starts = self.call(start_states, task, arm, demonstrations, expert.curriculum)
        compute = self.settings.compute
        cell = run_cell(
            self.context,
            task,
            arm,
            base=base,
            warmup=warmup,
            starts=starts,
            demonstrations=demonstrations,
            parameters=self.settings.parameters,
            prompt=expert.prompt,
            curriculum=expert.curriculum,
            reward=expert.reward,
            rl=expert.rl,
            evaluation=expert.evaluation,
            engine=self.settings.engine,
            seed=self.settings.seed,
            retries=compute.retries,
            retry_delay_seconds=compute.retry_delay_seconds,
        )
        return starts, cell

    def compose(
        self, base: ArtifactRef, cells: dict[tuple[str, str], ArtifactRef], demonstrations: dict[str, ArtifactRef]
    ) -> ArtifactRef:
        """The experts of the chosen arm composed rank by rank."""
        settings = self.settings
        return self.call(
            compose,
            base,
            {task: cells[task, settings.composition.arm] for task in demonstrations},
            demonstrations,
            {task: expert.prompt for task, expert in settings.experts.items()},
            settings.composition,
            settings.seed,
        )

    def evaluate(
        self,
        model: str,
        task: str,
        base: ArtifactRef,
        weights: tuple[ArtifactRef, str] | None,
        demonstrations: ArtifactRef,
    ) -> ArtifactRef:
        """One model's answers to the task's test questions."""
        expert = self.settings.experts[task]
        return self.call(
            evaluate,
            model,
            task,
            base,
            weights,
            demonstrations,
            expert.prompt,
            expert.evaluation,
            self.settings.engine,
            self.settings.seed,
        )

    def report(
        self,
        demonstrations: dict[str, ArtifactRef],
        starts: dict[tuple[str, str], ArtifactRef],
        cells: dict[tuple[str, str], ArtifactRef],
        composition: ArtifactRef | None,
        evaluations: list[ArtifactRef],
    ) -> str:
        """The report, and what of it is shown as Prefect artifacts."""
        made = self.call(
            report,
            self.settings.model_dump(mode="json", exclude={"root", "compute"}),
            demonstrations,
            starts,
            cells,
            composition,
            evaluations,
            self.settings.seed,
            {name: version(name) for name in ("torch", "transformers", "peft", "prefect")},
        )
        report_artifacts(self.context, made)
        return made.url


@contextmanager
def run_lock(settings: RunSettings):
    """One process at a time works on a run of a local root; the kernel frees the lock when its holder dies.

    Raises UserError where another process holds it, or the root cannot be written.
    """
    if not storage.is_local(settings.root):
        yield
        return
    import fcntl

    folder = storage.local_path(settings.root) / settings.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"root {settings.root!r} cannot be written ({error.strerror}); choose another --root") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run {settings.name!r} is being worked on by another process; wait for it or choose another --name"
            ) from None
        file.write(str(os.getpid()))
        file.flush()
        yield
