"""What a step of the models room is asked to do: settings and local paths, as JSON. Imports neither torch nor prefect.

Each request names one step function, `f(request, out, report) -> dict`: `out` is an empty local folder for its files,
`report` takes log lines and progress, and the dictionary (JSON values: row counts, figures) goes into the manifest.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from data.settings import (
    AnswerKind,
    BenchmarkSource,
    Curriculum,
    MetaActions,
    PlainReasoning,
    Prompt,
    Reasoning,
    RewardSettings,
    Segmentation,
    Settings,
    SuiteSource,
)
from models.settings import (
    CompositionSettings,
    Engine,
    EvaluationSettings,
    Model,
    Parameters,
    PretrainedModel,
    RLSettings,
    Tracking,
    WarmupSettings,
)


class Device(Settings):
    """Where the step computes."""

    device: str = "auto"
    threads: int | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    """`bf16`: products of an update in bfloat16, parameters and sums in their own type."""


class Launch(Settings):
    """How `accelerate launch` starts the processes that compute together."""

    config: Path
    """accelerate's configuration file: data parallel (MULTI_GPU) or FSDP of version 2."""
    processes: int
    machines: int = 1
    """With several, each of the others runs `accelerate launch --config_file FILE -m models.compute` itself."""


class BaseRequest(Settings):
    """models.base:prepare → `model/` (tiny: safetensors, tokenizer), `base.json`, `metrics.parquet`."""

    model: Model
    corpus: tuple[SuiteSource, ...] = ()
    """What a tiny model is pre-trained on."""
    prompts: tuple[Prompt, ...] = ()
    """The prompt of each suite of `corpus`, in the same order."""
    pieces: tuple[str, ...] = ()
    """Texts that a tiny model's tokenizer must hold as one token each, beside the common words of `corpus`."""
    excluded: tuple[Path, ...] = ()
    """questions.parquet files whose questions must not be pre-trained on."""
    seed: int = 0
    compute: Device = Device()


class PolicyFiles(Settings):
    """A policy on disk: the base folder made by models.base:prepare, and what was trained on top of it."""

    base: Path
    weights: Path | None = None
    """Folder with a PEFT adapter, or with full weights; None: the base itself."""


class SampleRequest(Settings):
    """models.rollout.spread:assist: a rank's share of rows to sample, exchanged with the other ranks."""

    policy: PolicyFiles
    engine: Engine
    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    limits: tuple[int, ...]
    temperature: float
    stop_strings: tuple[str, ...] = ()
    compute: Device = Device()


class WarmupRequest(Settings):
    """models.warmup:warm_up → `weights/`, `metrics.parquet`."""

    policy: PolicyFiles
    parameters: Parameters
    prompt: Prompt
    warmup: WarmupSettings
    demonstrations: Path
    """demonstrations.parquet; only its training split is used."""
    traces: Path | None = None
    """traces.parquet: meta-action traces to learn in place of the demonstrations."""
    seed: int
    compute: Device = Device()


class TracesRequest(Settings):
    """models.meta_actions.synthesis:synthesise → `traces.parquet`, `data_card.json`."""

    policy: PolicyFiles
    """Whose errors become wrong attempts: warmed up on the plain demonstrations. Not read in mode corrupt, but for its
    tokenizer."""
    prompt: Prompt
    reasoning: MetaActions
    engine: Engine
    demonstrations: Path
    """demonstrations.parquet; only its training split is used."""
    suite: str | None = None
    """The procedural suite that the demonstrations come from: its mistakes and checks are used where it has them."""
    segmentation: Segmentation = "lines"
    """Where a sampled attempt is cut into steps."""
    seed: int
    compute: Device = Device()


class RolloutsRequest(Settings):
    """models.rounds:generate → `rollouts.parquet`, `curriculum.json` (its state after choosing), `metrics.parquet`."""

    policy: PolicyFiles
    reference: PolicyFiles
    """The warm-up policy; read only where a KL term is on."""
    prompt: Prompt
    curriculum: Curriculum
    curriculum_state: Path | None
    """curriculum.json of the round before; None in round 0."""
    reasoning: Reasoning = PlainReasoning()
    reward: RewardSettings
    rl: RLSettings
    engine: Engine
    start_states: Path
    """start_states.parquet"""
    round: int
    generated_tokens_so_far: int
    seed: int
    compute: Device = Device()


class UpdateRequest(Settings):
    """models.update:update → `weights/`, `trainer_state/`, `metrics.parquet`."""

    policy: PolicyFiles
    parameters: Parameters
    rollouts: Path
    """rollouts.parquet"""
    trainer_state: Path | None
    """trainer_state/ of the round before; None in round 0."""
    reasoning: Reasoning = PlainReasoning()
    rl: RLSettings
    round: int
    generated_tokens_so_far: int
    seed: int
    compute: Device = Device()


class EvaluateRequest(Settings):
    """models.evaluation:evaluate → `evaluations.parquet`."""

    policy: PolicyFiles
    model: str
    """The name under which the answers are filed: base, warmup, plain_rl, r3, composed, ..."""
    prompt: Prompt
    reasoning: Reasoning = PlainReasoning()
    evaluation: EvaluationSettings
    engine: Engine
    questions: Path
    """questions.parquet"""
    split: str = "test"
    limit: int | None = None
    seed: int = 0
    compute: Device = Device()


class BenchmarkRequest(Settings):
    """models.benchmarking:evaluate_benchmarks → `evaluations.parquet`, `score.json`.

    Like a cell it owns a whole folder: answers are kept there question by question, and a killed evaluation goes on.
    """

    folder: Path
    model: str
    """The name under which the answers are filed."""
    base: PretrainedModel | Path
    """A model by folder or hub name, or a base folder made by models.base:prepare."""
    weights: Path | None = None
    """Folder with a PEFT adapter or with full weights on top of `base`."""
    benchmarks: tuple[BenchmarkSource, ...] = Field(min_length=1)
    answer_kind: AnswerKind | None = None
    """Graded as this kind instead of the benchmark's own: programs for golds that are numbers."""
    prompt: Prompt | None = None
    """None: the model's chat template where it has one, else a plain prompt."""
    evaluation: EvaluationSettings
    greedy: bool = True
    """One greedy answer to each question as well, where `evaluation` asks for samples with a temperature."""
    engine: Engine
    questions_per_part: int = Field(64, ge=1)
    """Questions that are answered, then saved: at most this many are answered again after a kill."""
    seed: int = 0
    compute: Device = Device()


class CellRequest(Settings):
    """models.cell:run_rounds: rounds of one cell (task, arm, seed), until its budget, `last_round` or the deadline.

    Unlike the others it owns a whole folder, `url`, any fsspec URL: `rounds/0007/{rollouts,update,validation}`, each
    published when complete; after an interruption it continues from the newest complete one.
    """

    url: str
    key: str
    """What the cell is made from; rounds of another key are not continued."""
    base: Path
    warmup: Path
    """The warm-up's weights folder: round 0's policy, and the reference."""
    parameters: Parameters
    prompt: Prompt
    curriculum: Curriculum
    reasoning: Reasoning = PlainReasoning()
    reward: RewardSettings
    rl: RLSettings
    evaluation: EvaluationSettings
    engine: Engine
    start_states: Path
    questions: Path
    last_round: int | None = None
    """Do no round after this one; None: until the budget is spent."""
    tracking: Tracking = Tracking()
    seed: int
    compute: Device = Device()


class ComposeRequest(Settings):
    """models.loracoe.step:compose → `pool/`, `importance.parquet`, `gates.json`, `exported/<task>/`, metrics."""

    base: Path
    experts: dict[str, Path]
    """Name → folder of a PEFT adapter; one with a task's name is that task's own."""
    demonstrations: dict[str, Path]
    """Task → demonstrations.parquet"""
    prompts: dict[str, Prompt]
    composition: CompositionSettings
    seed: int
    same_base: bool = True
    """The adapters are known to be of this base (a run trained them); False: their configurations must name it."""
    compute: Device = Device()


class AnswerRequest(Settings):
    """models.evaluation:answer → nothing on disk; returns the completion of one question."""

    policy: PolicyFiles
    prompt: Prompt
    evaluation: EvaluationSettings
    engine: Engine
    question: str
    prefix: str = ""
    compute: Device = Device()


class ExportRequest(Settings):
    """models.export:export → an adapter or a whole model as others load it, with README.md."""

    policy: PolicyFiles
    merge: bool = False
    """Full weights with the adapter merged in, instead of the adapter."""
    base_name: str | None = None
    """What the adapter is to name as its base; None: where the base is."""
    title: str
    prompt: Prompt
    facts: dict[str, str]
    """What the model card says: data, figures, hashes."""
    compute: Device = Device()
