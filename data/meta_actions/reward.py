"""The reward of meta-action traces: correct first, the rest small and bounded.

    R = 1[correct] (1 + length + diversity) + 1[wrong] partial − malformed · 1[malformed] − overlong · over(L)

The settings' validation keeps the lowest reward of a correct trace above the highest of a wrong one at every length.
The design of every term is ours (of MetaAct-RL only "length-based reward and regularization" is known).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data.meta_actions.judging import Judged, signature, useful_blocks
from data.settings import LengthReward, MetaActionReward


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a group."""

    judged: Judged
    outcome: float | None
    """1 for correct, ε for wrong but readable, else 0; None where the gold cannot be read."""
    tokens: int
    """Sampled tokens, a restart's prefix not among them."""
    limit: int
    """Most tokens that could be sampled."""
    finished: bool = True
    """Whether the rollout ended by itself."""
    first: int = 0
    """Its first sampled block: a restart's prefix earns nothing."""

    @property
    def malformed(self) -> bool:
        """Whether the text is no legal trace: broken, or ended by itself before its answer."""
        status = self.judged.trace.status
        return status == "malformed" or (status == "truncated" and self.finished)


def overlong(tokens: int, limit: int, share: float) -> float:
    """over(L) = clip((L − (limit − cache)) / cache, 0, 1) with cache = share · limit (the shape of DAPO's eq. 13)."""
    cache = max(share * limit, 1.0)
    return min(1.0, max(0.0, (tokens - (limit - cache)) / cache))


def wanted_blocks(success: float, max_blocks: int) -> int:
    """n* = 1 + round((K_max − 1)(1 − p)): how many useful blocks a problem of success rate p is worth."""
    return 1 + round((max_blocks - 1) * (1 - success))


def length_terms(
    members: Sequence[Member], success: float, settings: LengthReward, max_blocks: int, progress: float
) -> list[float]:
    """The length term of each member: 0 for every wrong one, in ± `weight` for correct ones.

    `success` is the problem's success rate among rollouts from its root. Hard problems (`explore`): weight ·
    min(1, useful / n*). Easy ones (`shorten`): weight · (½ − (blocks − fewest) / (most − fewest)) over the correct
    members (Kimi k1.5's λ, on blocks). Both count blocks, never tokens. 0 before `start` of the training.
    """
    terms = [0.0] * len(members)
    correct = [i for i, member in enumerate(members) if member.judged.correct]
    if settings.mode == "off" or progress < settings.start or not correct:
        return terms
    if success <= settings.hard and settings.mode in ("explore", "both"):
        wanted = wanted_blocks(success, max_blocks)
        for i in correct:
            useful = len(useful_blocks(members[i].judged, members[i].first))
            terms[i] = settings.weight * min(1.0, useful / wanted)
    elif success >= settings.easy and settings.mode in ("shorten", "both"):
        blocks = {i: len(members[i].judged.trace.blocks) - members[i].first for i in correct}
        fewest, most = min(blocks.values()), max(blocks.values())
        if most > fewest:
            for i in correct:
                terms[i] = settings.weight * (0.5 - (blocks[i] - fewest) / (most - fewest))
    return terms


def diversity_terms(members: Sequence[Member], weight: float) -> list[float]:
    """weight · (1 − (how many members share the signature − 1) / (G − 1)) for correct members, 0 for the others."""
    if not weight or len(members) < 2:
        return [0.0] * len(members)
    signatures = [signature(m.judged, m.first) if m.judged.correct else None for m in members]
    counts = Counter(signatures)
    return [0.0 if s is None else weight * (1 - (counts[s] - 1) / (len(members) - 1)) for s in signatures]


def group_rewards(
    members: Sequence[Member], success: float, settings: MetaActionReward, max_blocks: int, progress: float
) -> list[dict[str, float | None]]:
    """The parts of the reward of each member of one group; their sum is the reward, `outcome` None makes it unscorable.

    `success` in [0, 1] is the problem's success rate from its root, `progress` in [0, 1] the share of the budget spent.
    """
    lengths = length_terms(members, success, settings.length, max_blocks, progress)
    diversities = diversity_terms(members, settings.diversity)
    parts: list[dict[str, float | None]] = []
    for member, length, diversity in zip(members, lengths, diversities, strict=True):
        over = overlong(member.tokens, member.limit, settings.overlong_share)
        parts.append(
            {
                "outcome": member.outcome,
                "length": length,
                "diversity": diversity,
                "malformed": -settings.malformed if member.malformed else 0.0,
                "overlong": -settings.overlong * over if over else 0.0,
            }
        )
    return parts
