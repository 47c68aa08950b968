"""What a run has made so far, for flows and commands that go on from it."""

from data import storage
from data.errors import UserError
from data.settings import PlainReasoning, Reasoning
from data.storage import ArtifactRef
from flows.config import arm_settings, resolve
from flows.inspect import run_settings
from flows.launch import layout
from flows.preflight import computing_python
from flows.settings import ExpertSettings
from tasks.steps import RunContext


def composed_folder(model: str, task: str) -> str:
    """Where a composition holds a model: a task's exported adapter, or all of it, which has pool and router."""
    return "." if model == "routed" else f"exported/{task}"


def reasoning_of(expert: ExpertSettings, weights: tuple[ArtifactRef, str] | None) -> Reasoning:
    """How a model's answers are read: a base (no weights) was not taught the tags, so it answers in plain text."""
    return expert.reasoning if weights is not None else PlainReasoning()


class FinishedRun:
    """A run's settings and outputs. Raises UserError for a run that is not there."""

    def __init__(self, root: str, name: str):
        self.root, self.name = storage.absolute(root), name
        self.raw = run_settings(self.root, name)
        self.settings = resolve(self.raw)
        compute = self.settings.compute
        self.context = RunContext(
            root=self.root,
            name=name,
            device=compute.device,
            threads=compute.threads,
            python=computing_python(self.settings.engine),
            mixed_precision=compute.mixed_precision,
            launch=layout(compute).launch,
            timeout=compute.step_timeout_seconds,
        )

    def tasks(self, chosen: list[str] | None) -> list[str]:
        """The chosen tasks, all where None. Raises UserError for one that the run does not have."""
        known = list(self.settings.experts)
        for task in chosen or []:
            if task not in known:
                raise UserError(f"tasks: run {self.name!r} has no task {task!r}; choose from {', '.join(known)}")
        return chosen or known

    def models(self) -> list[str]:
        """The models that a finished run has, in the order of its tables."""
        return ["base", "warmup", *self.settings.arms, *self.settings.composed_models]

    def output(self, *place: str) -> ArtifactRef:
        """A step's output. Raises UserError where it is not complete, with the reason."""
        found, reason = storage.find(self.context.url(*place))
        if found is None:
            raise UserError(f"run {self.name!r}: {'/'.join(place)}: {reason}; `ratchet run` makes it")
        return found

    def cell(self, task: str, arm: str) -> ArtifactRef:
        """The chosen checkpoint of a task and arm."""
        return self.output("experts", task, arm, str(self.settings.seed), "result")

    def weights(self, task: str, model: str) -> tuple[ArtifactRef, str] | None:
        """(output, folder in it) of a model's weights; None for the base. Raises UserError for an unknown model."""
        if model == "base":
            return None
        if model == "warmup":
            return self.output("experts", task, "warmup"), "weights"
        if model in self.settings.composed_models:
            return self.output("loracoe"), composed_folder(model, task)
        if model in self.settings.arms:
            return self.cell(task, model), "weights"
        raise UserError(f"models: run {self.name!r} has no model {model!r}; choose from {', '.join(self.models())}")

    def expert(self, task: str, model: str) -> ExpertSettings:
        """The settings under which a model answers the task's questions."""
        return arm_settings(self.settings, task, model) if model in self.settings.arms else self.settings.experts[task]
