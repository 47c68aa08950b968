"""The engine that the settings name."""

from data.errors import UserError
from models.policy import Policy
from models.rollout.engine import RolloutEngine
from models.rollout.transformers_engine import TransformersEngine
from models.settings import Engine
from models.settings import TransformersEngine as TransformersSettings


def make_engine(settings: Engine, policy: Policy) -> RolloutEngine:
    """An engine that samples from `policy`. Raises UserError for an engine that this version does not have."""
    if isinstance(settings, TransformersSettings):
        return TransformersEngine(policy, settings.batch_size)
    raise UserError(f"engine.kind {settings.kind!r} is not in this version; use engine.kind transformers")
