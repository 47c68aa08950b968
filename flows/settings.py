"""The settings of a run, read from a preset, a file and the command line. Imports neither torch nor prefect."""

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from data.settings import (
    AnswerKind,
    BenchmarkSource,
    Curriculum,
    MixedCurriculum,
    PlainPrompt,
    Prompt,
    RewardSettings,
    Segmentation,
    Settings,
    Source,
    Splits,
)
from models.settings import (
    CompositionSettings,
    Engine,
    EvaluationSettings,
    LoraTraining,
    Model,
    Parameters,
    RLSettings,
    TransformersEngine,
    WarmupSettings,
)

NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"


class ComputeSettings(Settings):
    """The child process that computes, and how long its requests may take."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1)
    """Threads of torch; None: one for each core."""
    retries: int = Field(2, ge=0)
    """Retries of a step for what can pass: a lost process, a time-out, a connection."""
    retry_delay_seconds: float = Field(2.0, ge=0)
    """First delay; each further one is twice as long."""
    step_timeout_seconds: float = Field(6 * 3600, gt=0)
    """After this long the child process is killed and the step counts as timed out."""


class ExpertSettings(Settings):
    """One task: its demonstrations, how they are cut and graded, and its own values of the shared sections."""

    source: Source
    test: BenchmarkSource | None = None
    """None: the test questions are held out of the demonstrations."""
    splits: Splits = Splits()
    segmentation: Segmentation = "lines"
    answer_kind: AnswerKind | None = None
    """None: what the source says."""
    prompt: Prompt = PlainPrompt()
    reward: RewardSettings = RewardSettings()
    curriculum: Curriculum = MixedCurriculum()
    warmup: WarmupSettings = WarmupSettings()
    rl: RLSettings = RLSettings()
    evaluation: EvaluationSettings = EvaluationSettings()


class ArmSettings(ExpertSettings):
    """An expert's settings with one arm's own values laid over them: what one cell (task, arm, seed) runs."""


class RunSettings(Settings):
    """Everything a run depends on. `experts` and `arms` are resolved: see `flows.config.resolve`."""

    name: str = Field("tiny", pattern=NAME)
    root: str = "runs"
    """Folder of the runs: a local path or any fsspec URL."""
    seed: int = Field(0, ge=0)
    model: Model
    parameters: Parameters = LoraTraining()
    engine: Engine = TransformersEngine()
    experts: dict[str, ExpertSettings] = Field(min_length=1)
    arms: dict[str, dict[str, Any]] = {"plain_rl": {"curriculum": {"kind": "none"}}, "r3": {"curriculum": {"kind": "mixed"}}}
    """Arm name → overrides of `curriculum`, `rl` and `reward` for every expert."""
    composition: CompositionSettings = CompositionSettings()
    compute: ComputeSettings = ComputeSettings()

    @model_validator(mode="after")
    def _consistent(self) -> "RunSettings":
        for kind, names in (("experts", self.experts), ("arms", self.arms)):
            for name in names:
                if not re.match(NAME, name):
                    raise ValueError(f"{kind}.{name}: use lower-case letters, digits, '_', '-' and '.' in the name")
        if self.composition.enabled and self.composition.arm not in self.arms:
            raise ValueError(
                f"composition.arm is {self.composition.arm!r}, which is not one of the arms {sorted(self.arms)}; "
                "name one of them or set composition.enabled false"
            )
        return self
