"""Rollouts by all processes that compute together: each samples its share of the rows with an engine of its own.

A sample's draws belong to its seed, so who samples it changes nothing but rounding. Rank 0 asks; the others load the
same policy from its files.
"""

from collections.abc import Sequence
from pathlib import Path

from data.progress import Report
from models.policy import Policy
from models.requests import SampleRequest
from models.rollout.engine import EngineDescription, Progress, RolloutEngine, RolloutInput, RolloutOutput
from models.rollout.transformers_engine import TransformersEngine
from models.settings import TransformersEngine as TransformersSettings
from models.world import World, shares, world


class SpreadEngine:
    """The engine of rank 0, which has the other ranks sample their shares."""

    def __init__(self, settings: TransformersSettings, policy: Policy):
        self.settings = settings
        self.compute = policy.compute
        self.files = policy.files
        self.own: RolloutEngine = TransformersEngine(policy, settings.batch_size)

    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """As every engine's; `progress` counts rank 0's share."""
        request = SampleRequest(
            policy=self.files,
            engine=self.settings,
            prompts=tuple(tuple(asked.prompt_ids) for asked in requests),
            seeds=tuple(asked.seed for asked in requests),
            limits=tuple(asked.max_new_tokens for asked in requests),
            temperature=temperature,
            stop_strings=tuple(stop_strings),
            compute=self.compute,
        )
        world().lead(f"{assist.__module__}:{assist.__name__}", request)
        return sample(self.own, request, world(), progress)

    def load_adapter(self, path: Path | None) -> None:
        """As every engine's; the other ranks read it with the next rows."""
        self.own.load_adapter(path)
        self.files = self.files.model_copy(update={"weights": path})

    def describe(self) -> EngineDescription:
        """Rank 0's engine."""
        return self.own.describe()


def assist(request: SampleRequest, out: Path, report: Report) -> None:
    """This rank's share of `request`, with a policy of its own."""
    engine = TransformersEngine(Policy.load(request.policy, compute=request.compute), request.engine.batch_size)
    sample(engine, request, world())


def sample(
    engine: RolloutEngine, request: SampleRequest, here: World, progress: Progress | None = None
) -> list[RolloutOutput]:
    """The outputs of all rows, on every rank; each samples its share."""
    costs = [len(prompt) + limit for prompt, limit in zip(request.prompts, request.limits)]
    mine = shares(costs, request.prompts, here.size)[here.rank]
    asked = [RolloutInput(list(request.prompts[i]), request.seeds[i], request.limits[i]) for i in mine]
    found = engine.generate(asked, request.temperature, request.stop_strings, progress) if asked else []
    everything: dict[int, RolloutOutput] = {}
    for part in here.gather(dict(zip(mine, found, strict=True))):
        everything |= part
    return [everything[i] for i in range(len(request.prompts))]
