"""What the steps of a comparison study are asked to do, as JSON. See models/requests.py; imports nothing slow."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from data.settings import Curriculum, PlainReasoning, Prompt, Reasoning, RewardSettings, Settings
from models.requests import Device
from models.settings import Engine, EvaluationSettings, Parameters, RLSettings, WarmupSettings


class WarmupRule(Settings):
    """When the warm-up stops: as soon as sampled success lies in both bands.

    Success is counted on held-out (validation) demonstrations, at the temperature of RL, on answers whose chain checks
    out where the task can judge chains. If no checkpoint lies in both bands, the one least outside of them is taken.
    """

    question_low: float = Field(0.01, ge=0, le=1)
    question_high: float = Field(0.04, ge=0, le=1)
    """Band of the success from the question."""
    last_low: float = Field(0.4, ge=0, le=1)
    last_high: float = Field(0.6, ge=0, le=1)
    """Band of the success from the last of five start states."""
    every: int = Field(10, ge=1)
    """Optimiser steps between two looks; the first look is after as many."""
    demonstrations: int = Field(100, ge=1)
    samples: int = Field(4, ge=1)
    """Samples a demonstration from the question; one from the last start state."""

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupRule":
        if self.question_low >= self.question_high or self.last_low >= self.last_high:
            raise ValueError("warmup_rule: the low end of a band must lie below its high end")
        return self


class StudyWarmupRequest(Settings):
    """models.study:warm_up → `weights/`, `metrics.parquet`, `warmup.json` (every look, and which was taken)."""

    base: Path
    parameters: Parameters
    prompt: Prompt
    reasoning: Reasoning = PlainReasoning()
    """meta_actions: the warm-up learns traces that are made from the demonstrations, and takes all of its steps."""
    warmup: WarmupSettings
    rule: WarmupRule | None
    """None: all of `warmup`'s steps."""
    rl: RLSettings
    """Temperature and length of the samples that the rule counts."""
    engine: Engine
    suite: str | None
    """Whose chains are judged; None: answers only."""
    demonstrations: Path
    """demonstrations.parquet"""
    seed: int
    compute: Device = Device()


class SupervisedTraining(Settings):
    """Supervised training on from the warm-up; the checkpoint with the best validation accuracy is the result."""

    warmup: WarmupSettings
    validate_every: int = Field(20, ge=1)
    """Optimiser steps between validations."""


class StudyCellRequest(Settings):
    """models.study:run_cell → `answers.parquet` (study_answers), `cell.json`: one cell (task, arm, seed) of a study.

    A step function of one's own gets this request too: it writes `answers.parquet` and returns its figures.
    """

    task: str
    arm: str
    kind: Literal["base", "warmup", "supervised", "rl", "step"]
    url: str
    """The cell's working folder, any fsspec URL: its rounds, from which an interrupted one continues."""
    key: str
    suite: str | None
    base: Path
    warmup: Path
    """Weights folder of the shared warm-up."""
    demonstrations: Path
    """Folder with demonstrations.parquet and questions.parquet."""
    parameters: Parameters
    prompt: Prompt
    curriculum: Curriculum
    reward: RewardSettings
    reasoning: Reasoning
    """How completions are read and rewarded; answers are read with it too, the base's apart."""
    rl: RLSettings
    supervised: SupervisedTraining | None
    evaluation: EvaluationSettings
    engine: Engine
    function: str | None
    """`models.module:function` of kind step."""
    options: dict[str, Any]
    """What that function wants to know besides."""
    split: Literal["test", "validation"]
    """validation: a trial, whose test questions are never read."""
    limit: int | None
    probe: int
    """Held-out demonstrations from whose start states the trained policy is sampled at the end; 0: none."""
    seed: int
    compute: Device = Device()


class CalibrationRequest(Settings):
    """models.calibration:calibrate → `calibration.json`: the base's sampled success by suite and difficulty."""

    base: Path
    suites: dict[str, Prompt]
    """Suite → prompt of its task."""
    difficulties: tuple[int, ...]
    excluded: tuple[Path, ...]
    """questions.parquet files: none of their questions is asked."""
    demonstrations: int = Field(100, ge=1)
    """Fresh examples a suite and difficulty."""
    rule: WarmupRule
    rl: RLSettings
    engine: Engine
    compute: Device = Device()
