"""The flow `reasoning-pipeline`: demonstrations in, an evaluated, composed model out."""

from importlib.metadata import version
from typing import Any

from prefect import flow, get_run_logger, runtime

from data import storage
from data.meta_actions.grammar import PIECES
from data.settings import MetaActions, Source, SuiteSource
from data.storage import ArtifactRef
from data.suites import SUITES
from flows import config, parameters
from flows.fan_out import train_experts
from flows.finished import composed_folder, reasoning_of
from flows.launch import layout
from flows.locks import run_lock
from flows.parameters import FanOut, Overrides, Preset, RunName, Seed, Tokens
from flows.preflight import computing_python
from flows.settings import ExpertSettings, RunSettings
from models.settings import Model
from tasks.base import base_model
from tasks.composition import compose
from tasks.compute import close_shared
from tasks.evaluation import evaluate
from tasks.ingestion import ingest
from tasks.report import report, report_artifacts
from tasks.rounds import run_cell
from tasks.start_states import start_states
from tasks.steps import RunContext, configured, result_of
from tasks.traces import traces
from tasks.warmup import warm_up


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    return str(given.get("name") or given.get("preset"))


@flow(name="reasoning-pipeline", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def reasoning_pipeline(
    preset: Preset = "tiny",
    name: RunName | None = None,
    root: str | None = None,
    seed: Seed | None = None,
    generated_tokens: Tokens | None = None,
    fan_out: FanOut | None = None,
    overrides: Overrides | None = None,
) -> str:
    """Demonstrations become an evaluated, composed model; finished steps are never done again.

    Args:
        preset: The shipped settings to start from (`ratchet presets` lists them).
        name: The run's name; runs with the same name and settings continue each other. Empty: the preset's name.
        root: Folder of the runs, a path or any fsspec URL; empty means the setting's own (runs).
        seed: Seed of everything random; empty means the setting's own (0).
        generated_tokens: Budget of an arm in generated tokens; empty means the setting's own.
        fan_out: Experts one after another in this process, or each as a run of the deployment expert-training/expert.
        overrides: Any other setting, nested, as in a settings file; for example {"rl": {"samples": 16}}.

    Returns:
        The URL of the report's folder.
    """
    settings = parameters.load(
        preset, overrides, name=name, root=root, seed=seed, generated_tokens=generated_tokens, fan_out=fan_out
    )
    try:
        # a worker that was killed may have left the run's process behind: its successor waits for that
        waits = runtime.deployment.id is not None
        with run_lock(settings.root, settings.name, wait=waits, log=get_run_logger().info):
            elsewhere = {
                "preset": preset,
                "name": settings.name,
                "root": settings.root,
                "seed": seed,
                "generated_tokens": generated_tokens,
                "overrides": overrides,
            }
            return Pipeline(settings).run(elsewhere)
    finally:
        close_shared()


def pieces(settings: RunSettings) -> tuple[str, ...]:
    """What a tiny base's tokenizer must hold as one token each: the grammar's words where an expert uses them."""
    return PIECES if any(isinstance(expert.reasoning, MetaActions) for expert in settings.experts.values()) else ()


def corpus_source(model: Model, source: SuiteSource) -> SuiteSource:
    """What pre-training reads of a suite: with difficulties of its own nothing depends on the expert's."""
    if model.kind != "tiny" or not model.pretrain_difficulties:
        return source
    return SuiteSource(suite=source.suite, seed=source.seed)


def may_be_met(model: Model, source: Source) -> bool:
    """Whether a tiny model's pre-training could meet a task's held-out questions, so that they must be excluded.

    A question of a suite spells out its steps: questions of different difficulties are never the same.
    """
    if model.kind != "tiny" or source.kind != "suite" or not model.pretrain_difficulties:
        return True
    difficulty = source.difficulty or SUITES[source.suite].default_difficulty
    return difficulty in model.pretrain_difficulties


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
            python=computing_python(settings.engine),
            mixed_precision=compute.mixed_precision,
            launch=layout(compute).launch,
            timeout=compute.step_timeout_seconds,
        )

    def call(self, task: Any, *arguments: Any, **named: Any) -> ArtifactRef:
        """Calls a step's task with the run's retries and returns the reference to its output."""
        compute = self.settings.compute
        return result_of(
            configured(task, compute.retries, compute.retry_delay_seconds)(self.context, *arguments, **named)
        )

    def run(self, elsewhere: dict[str, Any] | None = None) -> str:
        """All steps; returns the URL of the report's folder. `elsewhere`: parameters of experts' own runs."""
        settings = self.settings
        storage.write_json(self.context.url("settings.json"), settings.model_dump(mode="json"))
        demonstrations, base = self.prepare()
        models: dict[str, dict[str, tuple[ArtifactRef, str] | None]] = {"base": dict.fromkeys(demonstrations)}
        starts: dict[tuple[str, str], ArtifactRef] = {}
        cells: dict[tuple[str, str], ArtifactRef] = {}
        if settings.compute.fan_out == "deployment_runs" and elsewhere is not None:
            # afterwards the steps below find what the experts' runs have made
            compute, log = settings.compute, get_run_logger()
            train_experts(compute.expert_deployment, settings.experts, elsewhere, compute.retries, log.info)
        for task in settings.experts:
            warmup, trained = self.expert(task, base, demonstrations[task])
            models.setdefault("warmup", {})[task] = (warmup, "weights")
            for arm in settings.arms:
                starts[task, arm], cells[task, arm] = trained[arm]
                models.setdefault(arm, {})[task] = (cells[task, arm], "weights")
        composition = None
        if settings.composed_models:
            composition = self.compose(base, cells, demonstrations)
            for model in settings.composed_models:
                models[model] = {task: (composition, composed_folder(model, task)) for task in demonstrations}
        evaluations = [
            self.evaluate(model, task, base, weights, demonstrations[task])
            for model, by_task in models.items()
            for task, weights in by_task.items()
        ]
        return self.report(demonstrations, starts, cells, composition, evaluations)

    def prepare(self) -> tuple[dict[str, ArtifactRef], ArtifactRef]:
        """What all experts share: every task's demonstrations and held-out questions, and the base model."""
        settings, experts = self.settings, self.settings.experts
        demonstrations = {task: self.ingest(task, expert) for task, expert in experts.items()}
        base = self.call(
            base_model,
            settings.model,
            [(corpus_source(settings.model, e.source), e.prompt) for e in experts.values() if e.source.kind == "suite"],
            [demonstrations[task] for task, e in experts.items() if may_be_met(settings.model, e.source)],
            settings.seed,
            pieces(settings),
        )
        return demonstrations, base

    def expert(
        self, task: str, base: ArtifactRef, demonstrations: ArtifactRef
    ) -> tuple[ArtifactRef, dict[str, tuple[ArtifactRef, ArtifactRef]]]:
        """One expert: its warm-up, and of each arm the start states and the chosen checkpoint."""
        warmup = self.warm_up(task, self.settings.experts[task], base, demonstrations)
        arms = {arm: self.train(task, arm, base, warmup, demonstrations) for arm in self.settings.arms}
        return warmup, arms

    def ingest(self, task: str, expert: ExpertSettings) -> ArtifactRef:
        """The task's demonstrations and held-out questions."""
        return self.call(
            ingest, task, expert.source, expert.splits, expert.segmentation, expert.answer_kind, expert.test
        )

    def warm_up(
        self,
        task: str,
        expert: ExpertSettings,
        base: ArtifactRef,
        demonstrations: ArtifactRef,
        start: tuple[ArtifactRef, str] | None = None,
    ) -> ArtifactRef:
        """The task's supervised policy, where every arm starts: on its demonstrations, or on traces made from them.

        `start`: (output, folder in it) of weights to go on from; None: the base.
        """

        def learned(made: ArtifactRef | None = None, folder: str = "warmup") -> ArtifactRef:
            parameters, seed = self.settings.parameters, self.settings.seed
            texts = (task, base, demonstrations, parameters, expert.prompt, expert.warmup, seed)
            return self.call(warm_up, *texts, start if folder == "warmup" else None, made, folder)

        reasoning = expert.reasoning
        if not isinstance(reasoning, MetaActions):
            return learned()
        policy = learned(folder="plain_warmup") if reasoning.synthesis.mode == "rollouts" else None
        suite = expert.source.suite if expert.source.kind == "suite" else None
        unit = expert.segmentation or (SUITES[suite].segmentation if suite else None)
        made = self.call(
            traces,
            task,
            base,
            policy,
            demonstrations,
            expert.prompt,
            reasoning,
            self.settings.engine,
            suite,
            unit,
            self.settings.seed,
        )
        return learned(made)

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
            reasoning=expert.reasoning,
            reward=expert.reward,
            rl=expert.rl,
            evaluation=expert.evaluation,
            engine=self.settings.engine,
            tracking=self.settings.tracking,
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
            reasoning_of(expert, weights),
            expert.evaluation,
            self.settings.engine_of(model),
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
            self.settings.model_dump(mode="json", exclude={"root", "compute", "tracking"}),
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
