"""The settings of a comparison study: tasks, arms, seeds, budget, tuning, bars. Imports neither torch nor prefect."""

import re
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from data.errors import UserError
from data.settings import PlainReasoning, Reasoning, Settings
from data.study import Comparison, StudyShape
from flows import config
from flows.settings import NAME, ExpertSettings, RunSettings
from models.settings import WarmupSettings
from models.study_requests import SupervisedTraining, WarmupRule

STUDIES = Path(__file__).parent / "studies"


class BaseArm(Settings):
    """The untouched base model."""

    kind: Literal["base"] = "base"


class WarmupArm(Settings):
    """The shared warm-up, where every trained arm starts."""

    kind: Literal["warmup"] = "warmup"
    reasoning: dict[str, Any] = {}
    """What it changes of the tasks' `reasoning` section."""


class SupervisedArm(Settings):
    """The warm-up trained longer on the demonstrations; the checkpoint that is best on validation."""

    kind: Literal["supervised"] = "supervised"
    warmup: dict[str, Any] = {}
    """What it changes of the run's `warmup` section."""
    validate_every: int = Field(20, ge=1)
    trials: tuple[dict[str, Any], ...] = ()
    """Its tuning trials: changes of `warmup`, each tried on the pilot tasks. Empty: not tuned."""


class RLArm(Settings):
    """Reinforcement learning from the warm-up, with the sections of an arm of a run."""

    kind: Literal["rl"] = "rl"
    curriculum: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    """What it changes of the tasks' `reasoning` section; another kind or synthesis means a warm-up of its own, which
    arms with the same ones share."""
    reward: dict[str, Any] = {}
    rl: dict[str, Any] = {}
    budget_share: float = Field(1.0, gt=0, le=1)
    """Share of the study's generated tokens that this arm may use."""
    trials: tuple[dict[str, Any], ...] | None = None
    """Its tuning trials, changes of `rl`; None: the study's `tuning.trials`."""
    tuned_as: str | None = None
    """Another arm whose tuned values it takes over instead of being tuned itself."""


class StepArm(Settings):
    """A step function of one's own that trains and answers: see models.study_requests.StudyCellRequest."""

    kind: Literal["step"] = "step"
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function` of a module that the computing process can import."""
    options: dict[str, Any] = {}
    trials: tuple[dict[str, Any], ...] = ()
    """Its tuning trials: changes of `options`."""


Arm = Annotated[BaseArm | WarmupArm | SupervisedArm | RLArm | StepArm, Field(discriminator="kind")]


class Tuning(Settings):
    """Rates (and KL) are chosen on the validation questions of pilot tasks, then frozen for all tasks and seeds."""

    tasks: tuple[str, ...] = ()
    seed: int = 0
    """A pilot seed, none of the study's."""
    trials: tuple[dict[str, Any], ...] = ()
    """What is tried for each RL arm: changes of `rl`. All tuned arms have the same number of trials."""


class StudySettings(Settings):
    """A study file. `run` holds a run's settings over `preset`; its experts are the study's tasks."""

    name: str = Field(pattern=NAME)
    title: str
    scope: str
    """What the claim holds for."""
    preset: str = "tiny"
    run: dict[str, Any] = {}
    seeds: tuple[int, ...] = Field(min_length=1)
    arms: dict[str, Arm] = Field(min_length=1)
    warmup_rule: WarmupRule | None = None
    """None: the warm-up takes all of its steps."""
    tuning: Tuning = Tuning()
    comparisons: tuple[Comparison, ...] = ()
    least_questions: int = Field(1000, ge=1)
    """Fewest test questions a task."""
    probe: int = Field(60, ge=0)
    """Held-out demonstrations a cell from whose start states its policy is sampled at the end."""

    @model_validator(mode="after")
    def _consistent(self) -> "StudySettings":
        for name in self.arms:
            if not re.match(NAME, name) or "--" in name:
                raise ValueError(f"arms.{name}: use lower-case letters, digits, '_', '-' and '.' in the name, no '--'")
        for spec in self.comparisons:
            for arm in (spec.first, spec.second):
                if arm not in self.arms:
                    raise ValueError(
                        f"comparisons.{spec.name}: there is no arm {arm!r}; the arms are {sorted(self.arms)}"
                    )
        if self.tuning.tasks and self.tuning.seed in self.seeds:
            raise ValueError(
                f"tuning.seed {self.tuning.seed} is one of the study's seeds; choose another for the pilots"
            )
        counts = {name: len(self.trials(name)) for name in self.arms if self.trials(name)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"all tuned arms need the same number of trials, but they have {counts}")
        if counts and not self.tuning.tasks:
            raise ValueError("tuning.tasks names no pilot task, but arms have trials; name one or two")
        for name, arm in self.arms.items():
            other = getattr(arm, "tuned_as", None)
            if other is not None and (other not in self.arms or not self.trials(other)):
                raise ValueError(f"arms.{name}.tuned_as: {other!r} is no arm with trials of its own")
        return self

    def trials(self, name: str) -> tuple[dict[str, Any], ...]:
        """The tuning trials of an arm; none where it is not tuned itself."""
        arm = self.arms[name]
        if arm.kind in ("base", "warmup") or getattr(arm, "tuned_as", None) is not None:
            return ()
        return self.tuning.trials if arm.kind == "rl" and arm.trials is None else arm.trials


class Study:
    """A study file that was read and checked, and the run's settings that follow from it."""

    def __init__(self, settings: StudySettings, path: Path | None = None):
        self.settings = settings
        self.path = path
        self.run = self._run({name: {} for name in settings.arms})
        self._check()

    def _run(self, tuned: dict[str, dict[str, Any]]) -> RunSettings:
        arms = {}
        for name, arm in self.settings.arms.items():
            if arm.kind == "rl":
                # another kind or synthesis has a warm-up of its own, which arms of a run cannot have: see `reasoning`
                own = {} if {"kind", "synthesis"} & arm.reasoning.keys() else arm.reasoning
                values = {"curriculum": arm.curriculum, "reward": arm.reward, "reasoning": own}
                arms[name] = values | {"rl": config.merge(arm.rl, tuned.get(name, {}))}
            else:
                arms[name] = {}
        raw = {"arms": dict.fromkeys(config.load(self.settings.preset).arms), "composition": {"enabled": False}}
        raw["experts"] = dict.fromkeys(config.load(self.settings.preset).experts)
        run = config.merge(config.merge(raw, self.settings.run), {"arms": arms, "name": self.settings.name})
        return config.load(self.settings.preset, run)

    def _check(self) -> None:
        settings = self.settings
        for task in settings.tuning.tasks:
            if task not in self.run.experts:
                raise UserError(f"tuning.tasks: there is no task {task!r}; the tasks are {sorted(self.run.experts)}")
        for task, expert in self.run.experts.items():
            if expert.evaluation.max_new_tokens < expert.rl.max_new_tokens:
                raise UserError(
                    f"run.experts.{task}: evaluation.max_new_tokens {expert.evaluation.max_new_tokens} is below "
                    f"rl.max_new_tokens {expert.rl.max_new_tokens}: validation would cut chains that training allows"
                )
            if expert.test is None and expert.splits.test < settings.least_questions:
                raise UserError(
                    f"run.experts.{task}: {expert.splits.test} test questions are fewer than least_questions "
                    f"({settings.least_questions}); raise splits.test"
                )
        for name in settings.arms:
            for task in self.run.experts:
                self.reasoning(name, task)
            for number in range(len(settings.trials(name))):
                self.with_tuned({name: settings.trials(name)[number]})

    def with_tuned(self, tuned: dict[str, dict[str, Any]]) -> RunSettings:
        """The run's settings with the arms' tuned values (changes of `rl`) laid over them. UserError for wrong ones."""
        return self._run(tuned)

    def reasoning(self, name: str, task: str) -> Reasoning:
        """How an arm reasons on a task. Raises UserError for a wrong setting."""
        arm = self.settings.arms[name]
        if arm.kind == "step":
            return self.run.experts[task].reasoning
        if arm.kind not in ("rl", "warmup"):
            return PlainReasoning()
        cell = config.arm_settings(self.run, task, name).model_dump()
        try:
            return ExpertSettings.model_validate(config.merge(cell, {"reasoning": arm.reasoning})).reasoning
        except ValidationError as error:
            raise UserError(config.explain(error, f"arms.{name}.")) from None

    def supervised(self, name: str, task: str, tuned: dict[str, Any]) -> SupervisedTraining:
        """What a supervised arm trains with on a task. Raises UserError for a wrong setting."""
        arm = self.settings.arms[name]
        below = self.run.experts[task].warmup.model_dump()
        try:
            warmup = WarmupSettings.model_validate(config.merge(config.merge(below, arm.warmup), tuned))
        except ValidationError as error:
            raise UserError(config.explain(error, f"arms.{name}.warmup.")) from None
        return SupervisedTraining(warmup=warmup, validate_every=arm.validate_every)

    @property
    def shape(self) -> StudyShape:
        """What the figures need to know."""
        settings = self.settings
        return StudyShape(
            name=settings.name,
            title=settings.title,
            scope=settings.scope,
            tasks=tuple(self.run.experts),
            arms=tuple(settings.arms),
            seeds=settings.seeds,
            comparisons=settings.comparisons,
        )

    def commit(self) -> str | None:
        """The commit at which the study file is unchanged; None outside of any git repository.

        Raises UserError where it was changed after, or never committed: bars are set before test questions are graded.
        """
        if self.path is None or _git(self.path, "rev-parse", "--is-inside-work-tree") != "true":
            return None
        if _git(self.path, "status", "--porcelain", "--", self.path.name):
            raise UserError(
                f"{self.path} is not committed as it is: a study is committed before any test question is graded; "
                "commit it first"
            )
        return _git(self.path, "log", "-1", "--format=%H", "--", self.path.name) or None


def _git(path: Path, *arguments: str) -> str:
    """What git says in the folder of `path`; nothing where git is not there or fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=path.resolve().parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def study_names() -> list[str]:
    """The shipped studies, sorted."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def load_study(name: str) -> Study:
    """The study `name` (shipped, or a path of a TOML file). Raises UserError with field, reason and remedy."""
    path = STUDIES / f"{name}.toml" if name in study_names() else Path(name)
    if not path.is_file():
        raise UserError(f"there is no study {name!r}; name a TOML file or one of {', '.join(study_names()) or 'none'}")
    raw = config.read_toml(path)
    try:
        settings = StudySettings.model_validate(raw)
    except ValidationError as error:
        raise UserError(config.explain(error)) from None
    return Study(settings, path)
