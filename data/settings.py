"""Settings of the data room. Imports neither torch nor prefect, nor anything else that is slow to import."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, numbers are finite (JSON has no others), values do not
    change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, values: Any) -> Any:
        """A table without `kind` is of the field's default kind: `curriculum.n_stages = 6` means the default one's."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        for name, field in cls.model_fields.items():
            kind = getattr(field.default, "kind", None)
            if kind is not None and isinstance(filled.get(name), dict) and "kind" not in filled[name]:
                filled[name] = {"kind": kind, **filled[name]}
        return filled


AnswerKind = Literal["number", "math", "choice", "label", "program", "string", "float"]
Segmentation = Literal["lines", "sentences", "code_lines", "tokens", "whitespace"]


class ColumnMapping(Settings):
    """Which columns of a user's file hold the question, the rationale and the answer."""

    question: str = "question"
    rationale: str = "rationale"
    answer: str | None = "answer"
    """None: the answer is read from the end of the rationale."""


class FileSource(Settings):
    """Demonstrations from a file: JSON lines, a JSON array, CSV or Parquet, plain or gzipped, at any fsspec URL."""

    kind: Literal["file"] = "file"
    path: str
    format: Literal["auto", "columns", "gsm8k", "svamp", "aqua", "math", "instruction"] = "auto"
    """`auto` recognises the published layouts by their columns; `columns` uses `columns` below."""
    columns: ColumnMapping | None = None
    answer_kind: AnswerKind | None = None
    """None: what the recognised format implies."""
    limit: int | None = Field(None, ge=1)
    """At most this many accepted demonstrations, chosen by content hash so that the choice does not depend on order."""


class SuiteSource(Settings):
    """Demonstrations from a procedural suite of data/suites/."""

    kind: Literal["suite"] = "suite"
    suite: str
    demonstrations: int = Field(200, ge=1)
    """Training demonstrations to draw."""
    difficulty: int | None = Field(None, ge=1)
    """Number of reasoning steps and the like; None: the suite's own default."""
    seed: int = 0


class DatasetsSource(Settings):
    """Demonstrations through the `datasets` library: a hub name or a local path it understands."""

    kind: Literal["datasets"] = "datasets"
    name: str
    config: str | None = None
    split: str = "train"
    format: Literal["auto", "columns", "gsm8k", "svamp", "aqua", "math", "instruction"] = "auto"
    columns: ColumnMapping | None = None
    answer_kind: AnswerKind | None = None
    limit: int | None = Field(None, ge=1)


Source = Annotated[FileSource | SuiteSource | DatasetsSource, Field(discriminator="kind")]


class BenchmarkSource(Settings):
    """Held-out questions from a benchmark of data/benchmarks/."""

    name: str
    """Name of a registered benchmark (`gsm8k`, `svamp`, ...)."""
    path: str | None = None
    """File in the publisher's format; None: the benchmark's hub name."""
    limit: int | None = Field(None, ge=1)
    """At most this many questions, chosen by content hash."""
    decontaminate: bool = True
    """Refuse demonstrations whose question overlaps with one of these (in 8-grams); False: keep and count them."""
    overlap_threshold: float = Field(0.3, gt=0.0, le=1.0)
    """Share of common 8-grams from which two questions overlap (our choice: it still finds 94 to 100 % of the questions
    of GSM8K, SVAMP, SNLI, AQuA and BoardgameQA with one word changed, and is not taken in by their templates)."""


class Splits(Settings):
    """How many questions are held out of the demonstrations. They share no question with training."""

    validation: int = Field(100, ge=1)
    """Chooses checkpoints and learning rates."""
    promotion: int = Field(0, ge=0)
    """Compares an old with a new model before promotion."""
    test: int = Field(200, ge=0)
    """Reported, never chosen by. Ignored where the expert names a benchmark."""


class PlainPrompt(Settings):
    """The prompt is a template without chat roles."""

    kind: Literal["plain"] = "plain"
    template: str = "{question}\n"


class ChatPrompt(Settings):
    """The prompt is the tokenizer's own chat template with the question as the user's turn."""

    kind: Literal["chat"] = "chat"
    system: str | None = None
    template: str = "{question}"


Prompt = Annotated[PlainPrompt | ChatPrompt, Field(discriminator="kind")]


class NoCurriculum(Settings):
    """Plain outcome RL: every rollout starts from the question."""

    kind: Literal["none"] = "none"


class MixedCurriculum(Settings):
    """R³ as published: the union of the start states of all stages, sampled uniformly over stages."""

    kind: Literal["mixed"] = "mixed"
    n_stages: int = Field(5, ge=1)
    unique: bool = False
    """Short demonstrations collapse several stages to one start state: False keeps the repeats (published)."""
    question_share: float = Field(0.2, ge=0.0, le=1.0)
    """Least share of start states that are the question itself (1 / M, as published, where `n_stages` is 5): with more
    stages further groups start from the question, since the hard starts matter most."""


class StagedCurriculum(Settings):
    """One stage after another, from the last start state back to the question."""

    kind: Literal["staged"] = "staged"
    n_stages: int = Field(5, ge=1)
    rounds_per_stage: int | None = Field(5, ge=1)
    """Rounds after which the next stage begins in any case (our choice; unknown of the paper). None: no limit."""
    success_threshold: float = Field(0.8, gt=0.0, le=1.0)
    """A round's share of correct rollouts from which the next stage begins at once (our choice)."""
    replay: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of a round's start states that come from stages which are over (unknown of the paper; 0: none)."""


class AdaptiveCurriculum(Settings):
    """How much of a demonstration is revealed follows the policy's own success (our design; AdaBack is a relative).

    Starts are drawn where the reward of a group varies most, as a success model over the remaining steps predicts it.
    """

    kind: Literal["adaptive"] = "adaptive"
    question_share: float = Field(0.2, ge=0.0, le=1.0)
    """Least share of start states that are the question itself."""
    decay: float = Field(0.7, gt=0.0, le=1.0)
    """What an outcome still counts one round later: the policy moves."""
    prior_rollouts: float = Field(8.0, gt=0.0)
    """How many rollouts the pooled geometric model is worth beside the counts of one number of remaining steps."""
    intervals: bool = True
    """Whether a demonstration that was all right is revealed less the next time, and one that was all wrong more."""


Curriculum = Annotated[
    NoCurriculum | MixedCurriculum | StagedCurriculum | AdaptiveCurriculum, Field(discriminator="kind")
]


class RewardSettings(Settings):
    """The outcome reward of a rollout."""

    partial: float = Field(0.0, ge=0.0, lt=1.0)
    """ε for a finite, parsable but wrong answer; R³ published 0.1 (SVAMP) and 0.2 (GSM8K). 0: off."""
    difficulty_weight: Literal["none", "linear", "square"] = "none"
    """Weight of a rollout's reward by the share of the demonstration that it had to write itself, to the power 1 or 2;
    published as an ablation that is worse than equal rewards."""
    functions: tuple[str, ...] = ()
    """The user's reward functions by import path (`package.module:function`), added to the outcome reward."""


class PlainReasoning(Settings):
    """The response is free text, and its last answer is graded."""

    kind: Literal["plain"] = "plain"


class LengthReward(Settings):
    """A bounded bonus for correct traces by the number of their blocks (all numbers: our choice)."""

    mode: Literal["explore", "shorten", "both", "off"] = "both"
    """`explore`: more useful blocks on hard problems; `shorten`: fewer blocks on easy ones. The paper's is unknown."""
    weight: float = Field(0.1, ge=0, le=0.3)
    """Largest bonus; the largest malus is half of it."""
    hard: float = Field(0.4, ge=0, le=1)
    """Success rate of a problem up to which `explore` applies."""
    easy: float = Field(0.8, ge=0, le=1)
    """Success rate from which `shorten` applies."""
    start: float = Field(0.2, ge=0, le=1)
    """Share of the budget that is spent before the term comes on."""


class MetaActionReward(Settings):
    """What is added to a trace's outcome. A correct trace always ranks above a wrong one."""

    malformed: float = Field(0.1, gt=0)
    """Taken from a text that is no legal trace."""
    overlong: float = Field(0.5, ge=0, lt=1)
    """Taken in full at the length limit, in part in the last `overlong_share` of it."""
    overlong_share: float = Field(0.2, gt=0, le=1)
    length: LengthReward = LengthReward()
    diversity: float = Field(0.0, ge=0, le=0.3)
    """Bonus of a correct trace whose useful actions no other of its group took; 0: off."""

    @property
    def lowest_correct(self) -> float:
        """The lowest reward of a correct trace."""
        return 1 - self.overlong - (self.length.weight / 2 if self.length.mode in ("shorten", "both") else 0.0)

    @model_validator(mode="after")
    def _correct_first(self) -> "MetaActionReward":
        if self.lowest_correct <= 0:
            raise ValueError(
                f"a correct trace could be worth {self.lowest_correct:.3g}, a wrong one 0; "
                "lower overlong or length.weight"
            )
        if self.length.hard >= self.length.easy:
            raise ValueError(
                f"length.hard is {self.length.hard} and length.easy {self.length.easy}: hard must be lower"
            )
        return self


class ActionRegularisation(Settings):
    """Keeps the choice of actions at block boundaries open (all numbers: our choice)."""

    entropy_coefficient: float = Field(0.01, ge=0)
    """Largest coefficient of the entropy over legal actions; it adapts towards the target. 0: off."""
    entropy_target: float = Field(0.5, ge=0, le=1)
    """Wanted mean entropy at block boundaries as a share of its maximum; the bonus is on only at or below it."""
    entropy_step: float = Field(0.001, gt=0)
    """Change of the coefficient an optimiser step, up below the target and down above it."""
    kl_coefficient: float = Field(0.05, ge=0)
    """Coefficient of KL(policy ‖ warm-up) of the distribution over legal actions; 0: off."""


class Restarts(Settings):
    """Groups of rollouts that start at block boundaries of earlier rollouts (all numbers: our choice)."""

    share: float = Field(0.3, ge=0, lt=1)
    """Share of a round's groups; 0: off."""
    start: float = Field(0.05, ge=0, le=1)
    """Share of the budget that is spent before restarts begin."""
    anneal: float = Field(0.25, ge=0, le=1)
    """Last share of the budget over which they are led to 0."""
    choose: Literal["key", "random"] = "key"
    """`key`: by pre-score and value; `random`: boundaries drawn at random, no value filter (an ablation)."""
    balanced: bool = True
    """As many states whose candidate answer is wrong as ones whose candidate is right; False is an ablation."""
    states_per_problem: int = Field(4, ge=2)
    """Candidates kept of the rollouts of one problem in one round."""
    value_low: float = Field(0.1, ge=0, le=1)
    value_high: float = Field(0.9, ge=0, le=1)
    """A state is key where its Monte-Carlo value lies between these; others are dropped after their first visit."""
    max_age: int = Field(8, ge=1)
    """Rounds after which a state is dropped."""
    max_visits: int = Field(6, ge=1)
    """Groups started from a state before it is dropped."""
    capacity: int = Field(512, ge=2)
    """States kept from round to round."""


class TraceMix(Settings):
    """Shares of the kinds of warm-up traces; they must add up to 1."""

    plain: float = Field(0.3, ge=0, le=1)
    """One attempt and the answer."""
    confirm: float = Field(0.25, ge=0, le=1)
    """A right attempt, a critique that says so, the answer."""
    fix: float = Field(0.35, ge=0, le=1)
    """A wrong attempt, a critique that names its first wrong step, a refinement from the step before it."""
    two_fixes: float = Field(0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _whole(self) -> "TraceMix":
        total = self.plain + self.confirm + self.fix + self.two_fixes
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares add up to {total:.3g}; they must add up to 1")
        return self


class TraceSynthesis(Settings):
    """How plain demonstrations become warm-up traces (all numbers: our choice)."""

    mode: Literal["rollouts", "corrupt"] = "rollouts"
    """`rollouts`: the errors of a policy warmed up on the plain demonstrations, the first wrong step found by
    Monte-Carlo continuations; `corrupt`: one step of the demonstration spoilt, for tests and tiny models."""
    traces: int = Field(4000, ge=1)
    """At most this many demonstrations become traces."""
    mix: TraceMix = TraceMix()
    confirm_refined: float = Field(0.67, ge=0, le=1)
    """Share of the fixed traces whose refinement is confirmed by one more critique: with the default mix as many
    verdicts are "correct" as "wrong"."""
    wrong_content: Literal["mask_decision", "mask_all", "learn"] = "mask_decision"
    """What of a wrong attempt carries no loss: its first wrong step, all from there on, or nothing. In our trials
    `mask_all` taught policies to find everything correct."""
    longest_critique: float = Field(1.0, gt=0)
    """A critique longer than this times its attempt (in characters) is refused."""
    samples: int = Field(16, ge=2)
    """Rollouts a problem (mode rollouts)."""
    continuations: int = Field(8, ge=1)
    """Continuations a prefix (mode rollouts); a prefix counts as lost where at most one in eight is right."""
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(256, ge=1)


class MetaActions(Settings):
    """The response is a trace of meta-actions: reason, critique with a verdict, refine, answer."""

    kind: Literal["meta_actions"] = "meta_actions"
    max_blocks: int = Field(8, ge=2)
    """Most blocks of a trace, the answer among them."""
    synthesis: TraceSynthesis = TraceSynthesis()
    reward: MetaActionReward = MetaActionReward()
    regularisation: ActionRegularisation = ActionRegularisation()
    restarts: Restarts = Restarts()


Reasoning = Annotated[PlainReasoning | MetaActions, Field(discriminator="kind")]
