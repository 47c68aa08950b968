"""Known ways in which meta-action training goes wrong: what is measured, from where on it is a fault, what to change.

The limits are our rules of thumb, most of them from the cited works' reports of such failures.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, float]
WINDOW = 3
"""Rounds whose mean is compared, at the beginning and now."""


@dataclass(frozen=True)
class Alarm:
    """An alarm that rang."""

    name: str
    metric: str
    value: float
    limit: str
    advice: str

    @property
    def line(self) -> str:
        """Its line in the log and the report."""
        return f"alarm {self.name}: {self.metric} is {self.value:.3g} ({self.limit}); {self.advice}"


@dataclass(frozen=True)
class Rule:
    """When an alarm rings. `faulty` sees the figure now and, where `against_start`, its mean over the first rounds."""

    name: str
    metric: str
    faulty: Callable[[float, float], bool]
    limit: str
    advice: str
    against_start: bool = False
    after: float = 0.0
    """Share of the budget before which it stays silent."""
    first_round: bool = False
    """Looked at in round 0 alone: what the warm-up must have taught."""


def above(limit: float) -> Callable[[float, float], bool]:
    """Rings above a limit."""
    return lambda now, _: now > limit


def below(limit: float) -> Callable[[float, float], bool]:
    """Rings below a limit."""
    return lambda now, _: now < limit


RULES: tuple[Rule, ...] = (
    Rule("gate_malformed", "meta/malformed_share", above(0.05), "above 0.05 after the warm-up",
         "more warm-up steps or traces: RL would first have to learn the format", first_round=True),
    Rule("gate_verdicts", "meta/verdict_balanced_accuracy", below(0.85), "below 0.85 after the warm-up",
         "give critiques a local check, balance the verdicts, set reasoning.synthesis.wrong_content mask_decision",
         first_round=True),
    Rule("gate_entropy", "meta/boundary_entropy", below(0.1), "below 0.1 after the warm-up",
         "mix more kinds of traces (reasoning.synthesis.mix) or warm up for fewer steps", first_round=True),
    Rule("repetition", "meta/repeated_share", above(0.1), "above 0.1",
         "length by repetition: lower reasoning.reward.length.weight or raise reasoning.reward.overlong"),
    Rule("length_collapse", "meta/blocks_mean", lambda now, then: now < 0.7 * then, "below 0.7 of the first rounds",
         "set reasoning.reward.length.mode explore or off", against_start=True, after=0.3),
    Rule("long_blocks", "meta/tokens_per_block", lambda now, then: now > 1.5 * then, "above 1.5 of the first rounds",
         "blocks are padded: raise reasoning.reward.overlong or lower rl.max_new_tokens", against_start=True),
    Rule("endless_critique", "meta/full_share", above(0.2), "above 0.2",
         "set reasoning.reward.length.mode off or lower reasoning.max_blocks"),
    Rule("no_critique", "meta/share_critique", below(0.05), "below 0.05",
         "critiques die out: raise reasoning.regularisation.entropy_coefficient or kl_coefficient"),
    Rule("never_correcting", "meta/changed_share", below(0.05), "below 0.05",
         "refinements keep the answer: more fix traces in the warm-up, reasoning.restarts.share up", after=0.3),
    Rule("one_template", "meta/signature_top_share", above(0.8), "above 0.8",
         "raise reasoning.reward.diversity or reasoning.regularisation.entropy_coefficient"),
    Rule("decorative_critique", "meta/verdict_balanced_accuracy", below(0.7), "below 0.7",
         "verdicts say nothing: warm up longer on critiques before RL"),
    Rule("always_correct", "meta/verdict_correct_rate", above(0.8), "above 0.8",
         "lower rl.learning_rate, restart more from wrong candidates, or harder problems"),
    Rule("always_wrong", "meta/verdict_correct_rate", below(0.2), "below 0.2",
         "more confirm traces in the warm-up (reasoning.synthesis.mix), or easier problems"),
    Rule("planted_error", "meta/accuracy_first", lambda now, then: now < then - 0.02, "0.02 below the first rounds",
         "first attempts get worse: reward the answer alone, lower reasoning.restarts.share",
         against_start=True, after=0.3),
    Rule("malformed", "meta/malformed_share", above(0.1), "above 0.1",
         "lower rl.learning_rate or raise rl.kl.coefficient; a larger malformed penalty has led to collapse"),
    Rule("entropy_collapse", "meta/boundary_entropy", below(0.1), "below 0.1",
         "raise reasoning.regularisation.entropy_coefficient and entropy_step, or lower rl.learning_rate"),
    Rule("entropy_blow_up", "meta/boundary_entropy", above(0.9), "above 0.9",
         "lower reasoning.regularisation.entropy_coefficient or entropy_target; raise kl_coefficient"),
    Rule("restart_overfit", "meta/restart_gap", lambda now, then: now > then + 0.15, "0.15 above the first rounds",
         "restarts improve and roots do not: lower reasoning.restarts.share", against_start=True, after=0.3),
    Rule("buffer_imbalance", "meta/restart_wrong_share", lambda now, _: not 0.4 <= now <= 0.6, "outside 0.4 to 0.6",
         "set reasoning.restarts.balanced true"),
    Rule("dead_root_groups", "meta/zero_variance_root", above(0.6), "above 0.6",
         "problems are too easy or too hard: change the curriculum, rl.samples or rl.resample_draws"),
    Rule("dead_restart_groups", "meta/zero_variance_restart", above(0.6), "above 0.6",
         "states decide nothing: set reasoning.restarts.choose key, narrow value_low and value_high"),
)  # fmt: skip
"""Every alarm; docs/meta_actions.md lists them by failure."""


@dataclass
class AlarmHistory:
    """The figures of the first and of the latest rounds, which some alarms compare."""

    first: list[Figures] = field(default_factory=list)
    latest: list[Figures] = field(default_factory=list)
    ringing: list[str] = field(default_factory=list)
    """Alarms that rang in the round before: the log names an alarm when it begins to ring."""

    def ring(self, figures: Figures, round: int, progress: float) -> list[Alarm]:
        """Takes note of a round's figures and returns the alarms that ring."""
        known = dict(figures)
        if "meta/restart_accuracy" in figures and "meta/accuracy_last" in figures:
            known["meta/restart_gap"] = figures["meta/restart_accuracy"] - figures["meta/accuracy_last"]
        known = {rule.metric: known[rule.metric] for rule in RULES if rule.metric in known}
        if len(self.first) < WINDOW:
            self.first.append(known)
        self.latest = [*self.latest[1 - WINDOW :], known]
        rung = []
        for rule in RULES:
            if rule.first_round:
                now, then, due = known.get(rule.metric), 0.0, round == 0
            else:
                now, then = _mean(self.latest, rule.metric), _mean(self.first, rule.metric)
                due = len(self.latest) == WINDOW and progress >= rule.after and rule.metric in known
                due = due and not (rule.against_start and round < 2 * WINDOW)
            if due and now is not None and rule.faulty(now, then if then is not None else 0.0):
                rung.append(Alarm(rule.name, rule.metric, now, rule.limit, rule.advice))
        return rung

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which another history continues."""
        return {"first": self.first, "latest": self.latest, "ringing": self.ringing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self.first, self.latest, self.ringing = state["first"], state["latest"], state["ringing"]


def new_lines(history: AlarmHistory, rung: list[Alarm]) -> list[str]:
    """The lines of the alarms that did not ring in the round before; remembers those that ring now."""
    lines = [alarm.line for alarm in rung if alarm.name not in history.ringing]
    history.ringing = [alarm.name for alarm in rung]
    return lines


def _mean(rounds: list[Figures], metric: str) -> float | None:
    values = [figures[metric] for figures in rounds if metric in figures]
    return sum(values) / len(values) if values else None


def line_of(name: str) -> str | None:
    """What to change for an alarm of this name; None where there is none."""
    rule = next((rule for rule in RULES if rule.name == name), None)
    return None if rule is None else f"{rule.metric} {rule.limit}: {rule.advice}"
