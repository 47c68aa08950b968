"""What a round does beside plain rollouts where the response is a trace of meta-actions.

Start states and demonstrations are written as traces, rollouts are judged block by block and rewarded group by group,
the choices at block boundaries get their log-probabilities, and some groups start at boundaries of earlier rollouts.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.meta_actions.alarms import AlarmHistory, new_lines
from data.meta_actions.grammar import ACTIONS, answer_block, block, opening, token_spans
from data.meta_actions.judging import Judged, judge
from data.meta_actions.metrics import Record, round_figures
from data.meta_actions.restarts import KeyState, RestartBuffer, Rollout
from data.meta_actions.reward import Member, group_rewards
from data.rewards import Scored
from data.settings import MetaActions
from models.meta_actions.actions import RowBoundaries, action_logprobs, is_regularised
from models.meta_actions.tags import Boundary, boundaries, read_tags
from models.policy import Policy
from models.requests import RolloutsRequest
from models.scoring import TokenRow
from models.tokenization import sampled_offsets

STATE_NAMES = ("item_id", "task", "question", "answer", "answer_kind")


def as_trace(prefix: str, remainder: str, answer: str) -> tuple[str, str]:
    """A demonstration cut into prefix and remainder, as the beginning and the rest of a plain trace."""
    text = f"{block('reason', prefix + remainder)}\n{answer_block(answer)}"
    start = f"{opening('reason')}\n{prefix}" if prefix else ""
    return start, text[len(start) :]


@dataclass
class Facts:
    """What is known of one rollout."""

    row: dict[str, Any]
    """Its row of the table rollouts."""
    state: dict[str, Any]
    """The row of its start state."""
    judged: Judged
    offsets: list[tuple[int, int]]
    boundaries: list[Boundary]
    first: int
    """Its first sampled block."""
    limit: int
    outcome: float | None
    key: KeyState | None
    """The state it restarted from; None: it started from its root."""
    success: float = 0.0
    logprobs: list[list[float]] | None = None

    @property
    def member(self) -> Member:
        """As its group's reward sees it."""
        finished = self.row["stop_reason"] not in ("length", "error")
        tokens = len(self.row["completion_ids"])
        return Member(self.judged, self.outcome, tokens, self.limit, finished, self.first)

    def entropies(self) -> list[tuple[Boundary, float]]:
        """The normalised entropy of each choice between several actions."""
        found = []
        for boundary, logprobs in zip(self.boundaries, self.logprobs or ()):
            legal = [p for p, possible in zip(logprobs, boundary.legal) if possible]
            if len(legal) > 1:
                found.append((boundary, -sum(math.exp(p) * p for p in legal) / math.log(len(legal))))
        return found


class MetaRound:
    """One round's traces, and the states that later rounds restart from."""

    def __init__(self, request: RolloutsRequest, policy: Policy, carried: dict[str, Any] | None) -> None:
        self.request = request
        self.settings: MetaActions = request.reasoning
        self.policy = policy
        self.tags = read_tags(policy.tokenizer)
        self.buffer = RestartBuffer(self.settings.restarts, request.seed)
        self.history = AlarmHistory()
        if carried is not None:
            self.buffer.load_state_dict(carried["restarts"])
            self.history.load_state_dict(carried["alarms"])
        self.progress = request.generated_tokens_so_far / request.rl.generated_tokens
        self.facts: dict[tuple[int, int], Facts] = {}
        self.restarted: dict[str, KeyState] = {}
        """Start state → the key state that it is."""

    def restarts(self) -> list[dict[str, Any]]:
        """Start states of this round's restart groups, as rows of the table start_states (their ids: `prompt`)."""
        chosen = self.buffer.choose(self.request.round, self.request.rl.prompts, self.progress)
        room = self.policy.context
        self.restarted = {state.id: state for state in chosen if len(state.ids) < room}
        return [
            {**state.row, "start_state_id": key, "stage": None, "remainder": ""}
            for key, state in self.restarted.items()
        ]

    def grade(self, rows: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> list[str]:
        """Judges rollouts and returns the texts that alone are graded for the outcome: their answer blocks."""
        texts = []
        for row, state in zip(rows, states, strict=True):
            ids = [*row["prompt_ids"][len(row["prompt_ids"]) - row["prefix_length"] :], *row["completion_ids"]]
            text, offsets = sampled_offsets(self.policy.tokenizer, ids)
            judged = judge(text, state["answer"], state["answer_kind"], self.settings.max_blocks)
            written = offsets[row["prefix_length"] - 1][1] if row["prefix_length"] else 0
            found = boundaries(self.tags, judged.trace.blocks, ids, offsets, row["prefix_length"])
            self.facts[row["group"], row["sample"]] = Facts(
                row=row,
                state=state,
                judged=judged,
                offsets=offsets,
                boundaries=found,
                first=sum(b.end <= written for b in judged.trace.blocks),
                limit=min(self.request.rl.max_new_tokens, self.policy.context - len(row["prompt_ids"])),
                outcome=None,
                key=self.restarted.get(row["start_state_id"]),
            )
            texts.append(judged.trace.answer or "")
        return texts

    def reward(self, rows: Sequence[dict[str, Any]], scored: Sequence[Scored]) -> None:
        """Puts correctness, reward and its parts into rows of whole groups that `grade` has judged."""
        groups: dict[int, list[Facts]] = defaultdict(list)
        for row, found in zip(rows, scored, strict=True):
            facts = self.facts[row["group"], row["sample"]]
            failed = row["stop_reason"] == "error"
            facts.outcome = found.parts["outcome"]
            row |= {
                "correct": facts.judged.correct and not failed,
                "parsed": facts.judged.parsed,
                "reason": "the engine gave no finite distribution" if failed else facts.judged.reason,
            }
            groups[row["group"]].append(facts)
        users = {(row["group"], row["sample"]): found.parts for row, found in zip(rows, scored)}
        for members in groups.values():
            success = sum(f.row["correct"] for f in members) / len(members)
            for facts in members:
                facts.success = success if facts.key is None else facts.key.success
            parts_G = group_rewards(
                [facts.member for facts in members],
                members[0].success,
                self.settings.reward,
                self.settings.max_blocks,
                self.progress,
            )
            for facts, parts in zip(members, parts_G, strict=True):
                row = facts.row
                own = users[row["group"], row["sample"]]
                parts = parts | {name: value for name, value in own.items() if name != "outcome"}
                present = [value for value in parts.values() if value is not None]
                unscorable = row["stop_reason"] == "error" or parts["outcome"] is None
                row["reward_parts"] = json.dumps(parts, sort_keys=True)
                row["reward"] = None if unscorable else math.fsum(present)

    def annotate(self, rows: Sequence[dict[str, Any]]) -> None:
        """Puts the choices at block boundaries with their log-probabilities into the column `trace` of rows."""
        facts = [self.facts[row["group"], row["sample"]] for row in rows]
        tokens = [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows]
        rl = self.request.rl

        def measured(policy: Policy) -> list[list[list[float]]]:
            return action_logprobs(
                policy.network,
                tokens,
                [f.boundaries for f in facts],
                self.tags,
                rl.temperature,
                rl.tokens_per_micro_batch,
            )

        logprobs = measured(self.policy)
        reference = None
        if self.settings.regularisation.kl_coefficient:
            with self.policy.reference(self.request.reference) as policy:
                reference = measured(policy)
        for number, (found, row) in enumerate(zip(facts, rows, strict=True)):
            found.logprobs = logprobs[number]
            trace = found.judged.trace
            row["trace"] = json.dumps(
                {
                    "status": trace.status,
                    "code": trace.code,
                    "actions": [b.action for b in trace.blocks],
                    "first": found.first,
                    "restart": found.key is not None,
                    "boundaries": [[b.column, b.block, b.state, b.action] for b in found.boundaries],
                    "logprobs": logprobs[number],
                    "reference": None if reference is None else reference[number],
                }
            )

    def observe(self) -> None:
        """Values the restarted states, and takes this round's block boundaries as candidates for later rounds."""
        groups: dict[int, list[Facts]] = defaultdict(list)
        for (group, _), facts in sorted(self.facts.items()):
            groups[group].append(facts)
        restarted = [members for members in groups.values() if members[0].key is not None]
        self.buffer.observe([(m[0].key, [f.row["correct"] for f in m]) for m in restarted])
        if self.settings.restarts.share:
            roots = [[self._rollout(f) for f in m] for m in groups.values() if m[0].key is None]
            self.buffer.add(roots, self.request.round)

    def _rollout(self, facts: Facts) -> Rollout:
        row, blocks = facts.row, facts.judged.trace.blocks
        prompt = len(row["prompt_ids"]) - row["prefix_length"]
        after = {boundary.block - 1: value for boundary, value in facts.entropies()}
        has = [candidate is not None for candidate in facts.judged.candidates]
        spans = token_spans(blocks, facts.offsets)
        return Rollout(
            row={name: facts.state[name] for name in STATE_NAMES},
            ids=[*row["prompt_ids"], *row["completion_ids"]],
            prompt=prompt,
            name=f"{self.request.round}/{row['group']}/{row['sample']}",
            actions=[b.action for b in blocks],
            ends=[prompt + end for _, end in spans],
            texts=[facts.offsets[end - 1][1] for _, end in spans],
            text=row["completion"],
            candidates=[right if there else None for right, there in zip(facts.judged.right, has)],
            entropies=[after.get(number) for number in range(len(blocks))],
            correct=row["correct"],
        )

    def metrics(self) -> dict[str, float]:
        """The round's figures, with an entry for each alarm that rang."""
        records = [
            Record(
                judged=f.judged,
                group=group,
                restart=f.key is not None,
                tokens=len(f.row["completion_ids"]),
                first=f.first,
                success=f.success,
                malformed=f.member.malformed,
                entropies=tuple(value for _, value in f.entropies()),
                text=f.row["completion"],
            )
            for (group, _), f in sorted(self.facts.items())
        ]
        figures = round_figures(records, self.settings.max_blocks)
        keys = list(self.restarted.values())
        if keys:
            values = [state.value for state in keys if state.value is not None]
            figures |= {
                "meta/restart_value_mean": sum(values) / len(values),
                "meta/restart_key_share": sum(0.1 < v < 0.9 for v in values) / len(values),
                "meta/restart_wrong_share": sum(not state.right for state in keys) / len(keys),
                "meta/restart_age_mean": sum(self.request.round - s.version for s in keys) / len(keys),
                "meta/restart_blocks_mean": sum(state.block for state in keys) / len(keys),
            }
        if self.settings.restarts.share:
            figures["meta/restart_states"] = float(len(self.buffer.states))
        return figures

    def alarms(self, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        """A figure of 1 for each alarm that rings, and the log lines of those that begin to. Remembers the figures."""
        rung = self.history.ring(figures, self.request.round, self.progress)
        return {f"meta/alarm_{alarm.name}": 1.0 for alarm in rung}, new_lines(self.history, rung)

    def carried(self) -> dict[str, Any]:
        """What the next round continues from, beside the curriculum's state."""
        return {"restarts": self.buffer.state_dict(), "alarms": self.history.state_dict()}


def row_boundaries(row: dict[str, Any], settings: MetaActions, number: int) -> RowBoundaries | None:
    """The choices between several actions of a row of the table rollouts, for the update; None where they do not count.

    Raises ValueError for a row that was made without meta-actions.
    """
    if not is_regularised(settings.regularisation):
        return None
    if row["trace"] is None:
        raise ValueError(f"rollouts row {number} has no trace, but reasoning.kind is meta_actions")
    trace = json.loads(row["trace"])
    found = [Boundary(*values) for values in trace["boundaries"]]
    kept = [i for i, boundary in enumerate(found) if sum(boundary.legal) > 1]
    reference = trace["reference"] if settings.regularisation.kl_coefficient else None
    return RowBoundaries(
        [found[i].column for i in kept],
        torch.tensor([found[i].legal for i in kept], dtype=torch.bool).reshape(-1, len(ACTIONS)),
        None
        if reference is None
        else torch.tensor([reference[i] for i in kept], dtype=torch.float32).reshape(-1, len(ACTIONS)),
    )
