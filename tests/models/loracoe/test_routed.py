"""A composition with a router as a policy: the engine's answers are the gated model's, its hash covers all of it."""

import pytest
import torch

from data.errors import UserError
from models.loracoe.examples import Example, make_batch
from models.loracoe.gated import GatedModel
from models.loracoe.pool import save_pool
from models.loracoe.router_training import load_router, make_router, save_router
from models.loracoe.routers import TokenRouter
from models.policy import Policy
from models.requests import Device, ExportRequest, PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.scoring import TokenRow
from models.settings import (
    LoraTraining,
    SequenceRouterSettings,
    TokenRouterSettings,
    TransformersEngine,
    VLLMServerEngine,
)
from tests.models.loracoe.helpers import pool_of, write_adapter
from tests.tiny import save_base, tiny_llama

CPU = Device(device="cpu", threads=1)
PROMPTS = [[1, 5, 6], [1, 5, 6, 7, 8], [1, 40, 41, 42], [1, 9]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "base", tiny_llama())


def composition(folder, settings, shift=1.0):
    """pool/ and router/ as `compose` leaves them; the router is strong enough that its gates differ between prompts."""
    pool = pool_of(**{name: write_adapter(folder / name, seed) for seed, name in enumerate(["a", "b"])})
    save_pool(pool, folder / "pool")
    router = make_router(pool, 32, settings, seed=0)
    generator = torch.Generator().manual_seed(4)
    for parameter in router.parameters():
        if parameter.requires_grad:
            parameter.data += shift * torch.randn(parameter.shape, generator=generator)
    with GatedModel(tiny_llama(), pool) as gated:
        save_router(router, settings, gated, folder / "router")
    return folder


@pytest.fixture(
    scope="module", params=[SequenceRouterSettings(), TokenRouterSettings(active=5)], ids=["sequence", "token"]
)
def routed(request, tmp_path_factory):
    return composition(tmp_path_factory.mktemp("routed"), request.param)


def greedy(gated, router, prompt, count):
    """What the gated model itself generates, without the engine."""
    batch = make_batch([Example(prompt, [])], torch.device("cpu"))
    router.install(gated) if isinstance(router, TokenRouter) else router.install(gated, batch)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    return gated.model.generate(batch.ids_BT, attention_mask=batch.attention_mask_BT, **options)[0, len(prompt) :]


def test_the_engine_answers_with_the_routers_gates(base, routed):
    policy = Policy.load(PolicyFiles(base=base, weights=routed), compute=CPU)
    policy.eos_ids = frozenset()
    rows = [RolloutInput(prompt, 0, 6 + 2 * number) for number, prompt in enumerate(PROMPTS)]
    found = [
        output.completion_ids for output in make_engine(TransformersEngine(batch_size=3), policy).generate(rows, 0)
    ]
    pool, router = load_router(routed / "router", routed / "pool", 32)
    with GatedModel(tiny_llama(), pool) as gated, torch.no_grad():
        wanted = [greedy(gated, router, row.prompt_ids, row.max_new_tokens).tolist() for row in rows]
    plain = Policy.load(PolicyFiles(base=base), compute=CPU)
    plain.eos_ids = frozenset()
    without = make_engine(TransformersEngine(), plain).generate(rows, 0)
    assert found == wanted
    assert found != [output.completion_ids for output in without], "the base would answer otherwise"


def test_an_engine_takes_up_and_lays_down_the_routers_gates(base, routed):
    rows = [RolloutInput(prompt, 0, 6) for prompt in PROMPTS]
    engine = make_engine(TransformersEngine(), Policy.load(PolicyFiles(base=base), compute=CPU))
    before = engine.generate(rows, 0)
    engine.load_adapter(routed)
    own = make_engine(TransformersEngine(), Policy.load(PolicyFiles(base=base, weights=routed), compute=CPU))
    assert engine.generate(rows, 0) == own.generate(rows, 0) != before
    engine.load_adapter(None)
    assert engine.generate(rows, 0) == before, "the resident base has no gates"


def test_the_hash_is_of_pool_and_router(base, tmp_path):
    def hashed(folder):
        return Policy.load(PolicyFiles(base=base, weights=folder), compute=CPU).adapter_hash()

    one = composition(tmp_path / "one", SequenceRouterSettings())
    same = composition(tmp_path / "same", SequenceRouterSettings())
    router = composition(tmp_path / "router", SequenceRouterSettings(), shift=1.01)
    settings = composition(tmp_path / "settings", SequenceRouterSettings(active=3))
    pool = composition(tmp_path / "pool_", SequenceRouterSettings())
    save_pool(pool_of(a=pool / "b", b=pool / "a"), pool / "pool")
    assert hashed(one) == hashed(same)
    assert len({hashed(folder) for folder in (one, router, settings, pool)}) == 4


def test_what_cannot_hold_a_router_says_so(base, routed, tmp_path):
    files = PolicyFiles(base=base, weights=routed)
    policy = Policy.load(files, compute=CPU)
    with pytest.raises(UserError, match=r"engine.kind vllm_server.*one fixed adapter a request"):
        make_engine(VLLMServerEngine(urls=("http://127.0.0.1:1",)), policy)
    with pytest.raises(UserError, match="compose` trains"):
        Policy.load(files, LoraTraining(), CPU, trainable=True)
    if policy.routed.rows is not None:
        with pytest.raises(UserError, match="set by the engine"):
            policy.completion_logprobs([TokenRow([1, 5], [6])])
    from data.progress import Silent
    from data.settings import PlainPrompt
    from models.export import export

    with pytest.raises(UserError, match="export: the router"):
        request = ExportRequest(policy=files, title="t", prompt=PlainPrompt(), facts={}, compute=CPU)
        export(request, tmp_path, Silent())
    other = save_base(tmp_path / "other", tiny_llama(layers=1))
    with pytest.raises(UserError, match=r"another base.*is not in it"):
        Policy.load(PolicyFiles(base=other, weights=routed), compute=CPU)
