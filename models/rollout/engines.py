"""The engine that the settings name."""

from models.loracoe.files import check_not_routed
from models.policy import Policy
from models.rollout.engine import RolloutEngine
from models.settings import Engine
from models.settings import TransformersEngine as TransformersSettings
from models.settings import VLLMServerEngine as ServerSettings
from models.world import world


def make_engine(settings: Engine, policy: Policy) -> RolloutEngine:
    """An engine that samples from `policy`.

    Raises UserError where the engine's library is not installed or cannot sample from such a policy.
    """
    if isinstance(settings, TransformersSettings):
        from models.rollout.transformers_engine import TransformersEngine

        if world().size > 1 and world().led:
            from models.rollout.spread import SpreadEngine

            return SpreadEngine(settings, policy)
        return TransformersEngine(policy, settings.batch_size)
    check_not_routed(policy.files.weights, f"engine.kind {settings.kind}")
    if isinstance(settings, ServerSettings):
        from models.rollout.vllm_server import VLLMServerEngine

        return VLLMServerEngine(policy, settings)
    from models.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(policy, settings)
