"""The settings of a run. Imports neither torch nor prefect. `flows.config` reads them; DESIGN: one class a choice."""

import re
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from data.settings import (
    AnswerKind,
    BenchmarkSource,
    Curriculum,
    MetaActions,
    MixedCurriculum,
    PlainPrompt,
    PlainReasoning,
    Prompt,
    Reasoning,
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
    Tracking,
    TransformersEngine,
    WarmupSettings,
)

NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"


class ComputeSettings(Settings):
    """The child process that computes, and how long its requests may take."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1)
    """Threads of torch; None: one for each core."""
    processes: int = Field(1, ge=1)
    """Processes that compute rollouts, answers and updates together, one a GPU; started by `accelerate launch` if more
    than one. The numbers do not depend on it."""
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """`ddp`: each process holds the policy whole; `fsdp2`: parameters, gradients and moments are divided in updates."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """`bf16`: matrix products of an update in bfloat16. It changes the numbers by their rounding."""
    accelerate_config: str | None = None
    """accelerate's configuration file with processes, sharding and machines, in place of the two settings above."""
    retries: int = Field(2, ge=0)
    """Retries of a step for what can pass: a lost process, a time-out, a connection."""
    retry_delay_seconds: float = Field(2.0, ge=0)
    """First delay; each further one is twice as long."""
    fan_out: Literal["in_process", "deployment_runs"] = "in_process"
    """Where a run's experts are trained: one after another in the run's own process, or each as a run of the deployment
    `expert_deployment`, taken by any worker that shares the root URL. The numbers are the same."""
    expert_deployment: str = "expert-training/expert"
    step_timeout_seconds: float = Field(6 * 3600, gt=0)
    """After this long the child process is killed and the step counts as timed out."""

    @model_validator(mode="after")
    def _consistent(self) -> "ComputeSettings":
        if self.sharding == "fsdp2" and self.processes == 1 and self.accelerate_config is None:
            raise ValueError(
                "compute.sharding is fsdp2, but compute.processes is 1: there is nothing to divide; "
                "raise compute.processes or use ddp"
            )
        if self.accelerate_config is not None and (self.processes != 1 or self.sharding != "ddp"):
            raise ValueError(
                "compute.accelerate_config says processes and sharding itself; leave out compute.processes and "
                "compute.sharding"
            )
        return self


class SharedSections(Settings):
    """Sections that may stand at the top (for every expert), in an expert, and in an arm; the later one wins."""

    splits: Splits = Splits()
    prompt: Prompt = PlainPrompt()
    reasoning: Reasoning = PlainReasoning()
    reward: RewardSettings = RewardSettings()
    curriculum: Curriculum = MixedCurriculum()
    warmup: WarmupSettings = WarmupSettings()
    rl: RLSettings = RLSettings()
    evaluation: EvaluationSettings = EvaluationSettings()


class ExpertSettings(SharedSections):
    """One task: its demonstrations, how they are cut and graded, and its values of the shared sections."""

    source: Source
    test: BenchmarkSource | None = None
    """None: the test questions are held out of the demonstrations."""
    segmentation: Segmentation | None = None
    """None: the unit that the suite names, or R³'s for the recognised format (programs: code lines)."""
    answer_kind: AnswerKind | None = None
    """None: what the source says."""

    @model_validator(mode="after")
    def _meta_actions(self) -> "ExpertSettings":
        if not isinstance(self.reasoning, MetaActions):
            return self
        reward = self.reasoning.reward
        if self.reward.difficulty_weight != "none":
            raise ValueError(
                "reward.difficulty_weight weighs plain outcomes by their start state; with reasoning.kind meta_actions "
                "it would put right traces below wrong ones; set it to none"
            )
        if self.reward.partial >= reward.lowest_correct:
            raise ValueError(
                f"reward.partial is {self.reward.partial}, but a correct trace of meta-actions may be worth only "
                f"{reward.lowest_correct:.3g}; lower it"
            )
        extra = reward.diversity > 0 or (reward.length.mode != "off" and reward.length.weight > 0)
        if extra and self.rl.advantage.kind in ("group_mean_std", "global_normalisation"):
            raise ValueError(
                f"rl.advantage {self.rl.advantage.kind!r} divides by a standard deviation, which blows the small "
                "length and diversity terms of all-correct groups up to full size; use group_mean or leave_one_out, "
                "or set reasoning.reward.length.mode off and reasoning.reward.diversity 0"
            )
        if reward.length.mode in ("explore", "both") and not self.rl.train_truncated:
            raise ValueError(
                "rl.train_truncated false hides traces that grew too long from a reward for more blocks; "
                "set it true, or reasoning.reward.length.mode shorten or off"
            )
        return self


class ArmOverrides(Settings):
    """What an arm may change: sections that come after the shared warm-up."""

    curriculum: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    """Of meta-actions alone: reward, regularisation, restarts, max_blocks; the warm-up is shared."""
    reward: dict[str, Any] = {}
    rl: dict[str, Any] = {}


class RunSettings(BaseSettings):
    """Everything that a run depends on, each expert and arm spelled out (`flows.config.load` lays the layers)."""

    model_config = {**Settings.model_config, "env_prefix": "RATCHET_"}

    name: str = Field("tiny", pattern=NAME)
    root: str = Field("runs", min_length=1)
    """Folder of the runs: a local path or any fsspec URL."""
    seed: int = Field(0, ge=0, lt=2**31)
    model: Model
    parameters: Parameters = LoraTraining()
    engine: Engine = TransformersEngine()
    experts: dict[str, ExpertSettings] = Field(min_length=1)
    arms: dict[str, ArmOverrides] = {
        "plain_rl": ArmOverrides(curriculum={"kind": "none"}),
        "r3": ArmOverrides(curriculum={"kind": "mixed"}),
    }
    """Arm → what it changes for every expert; each arm starts from the same warm-up."""
    composition: CompositionSettings = CompositionSettings()
    compute: ComputeSettings = ComputeSettings()
    tracking: Tracking = Tracking()

    _fill_kinds = model_validator(mode="before")(Settings._default_kinds.__func__)

    @property
    def composed_models(self) -> tuple[str, ...]:
        """What the composition adds to the models: gates for each task, and the router, which is not told the task."""
        if not self.composition.enabled or len(self.experts) < 2:
            return ()
        return ("composed",) if self.composition.router.kind == "none" else ("composed", "routed")

    def engine_of(self, model: str) -> Engine:
        """What samples a model's answers. vLLM takes one fixed adapter a request: a routed model has transformers."""
        return TransformersEngine() if model == "routed" and self.engine.kind != "transformers" else self.engine

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is passed in: the environment does not change a run."""
        return (init_settings,)

    @model_validator(mode="after")
    def _consistent(self) -> "RunSettings":
        for kind, names in (("experts", self.experts), ("arms", self.arms)):
            for name in names:
                if not re.match(NAME, name):
                    raise ValueError(f"{kind}.{name}: use lower-case letters, digits, '_', '-' and '.' in the name")
        if taken := set(self.composed_models) & set(self.arms):
            raise ValueError(f"arms.{min(taken)}: that is the name of a composed model; rename the arm")
        if self.composition.enabled and len(self.experts) > 1:
            tagged = [task for task, expert in self.experts.items() if expert.reasoning.kind != "plain"]
            if tagged:
                raise ValueError(
                    f"composition learns gates on plain demonstrations, but experts.{tagged[0]}.reasoning.kind is "
                    "'meta_actions'; set composition.enabled false"
                )
        if self.composition.enabled:
            if self.composition.arm not in self.arms:
                raise ValueError(
                    f"composition.arm is {self.composition.arm!r}, which is not one of the arms {sorted(self.arms)}; "
                    "name one of them or set composition.enabled false"
                )
            if self.parameters.kind != "lora":
                raise ValueError(
                    "composition.enabled needs LoRA experts, but parameters.kind is 'full'; "
                    "set composition.enabled false or parameters.kind lora"
                )
        return self
