"""Equivalence classes of rollouts: batch mates, slots, budgets, order and prefixes shared change nothing."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.seeds import derive_seed
from data.settings import NoCurriculum, PlainPrompt, RewardSettings
from models.policy import Policy
from models.requests import PolicyFiles, RolloutsRequest
from models.rollout.engine import RolloutInput, RolloutOutput
from models.rollout.sampling import sample, uniforms
from models.rollout.transformers_engine import TransformersEngine
from models.rounds import Start, sampling_inputs
from models.scoring import TokenRow
from models.settings import RLSettings
from models.settings import TransformersEngine as EngineSettings
from tests.tiny import save_base, tiny_gpt2, tiny_llama

BOUNDARY = 1e-5
"""Rows of the same request may part where the draw lies this close to a boundary of the cumulative distribution."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """One model that is decoded directly and one by its own forward pass."""
    models = {"llama": tiny_llama(), "gpt2": tiny_gpt2()}
    return {
        name: Policy.load(PolicyFiles(base=save_base(tmp_path_factory.mktemp(name), model)))
        for name, model in models.items()
    }


def parted(policy: Policy, row: RolloutInput, one: RolloutOutput, other: RolloutOutput, temperature: float) -> int:
    """0 for equal rows; 1 where they part at a boundary; fails where they part elsewhere."""
    if one.completion_ids == other.completion_ids:
        assert one.stop_reason == other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        return 0
    place = next(i for i, (a, b) in enumerate(zip(one.completion_ids, other.completion_ids)) if a != b)
    with torch.no_grad():
        logits_NV, _ = policy.completion_logits(
            [TokenRow(row.prompt_ids, one.completion_ids[: place + 1])], temperature
        )
    ends_V = logits_NV[-1].double().softmax(-1).cumsum(-1)
    draw = uniforms([row.seed], place + 1)[0, place]
    assert (ends_V - draw).abs().min() < BOUNDARY
    return 1


@cache
def alone(policy: Policy, row: RolloutInput, temperature: float) -> RolloutOutput:
    return TransformersEngine(policy).generate([row], temperature)[0]


PROMPTS = ((1, 5), (1, 5, 6, 7), (1, 5, 6, 7, 8, 9, 10, 11), (1, 5, 6, 7, 8, 9, 10, 11, 12), (1, 20, 21), (30,))


@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.integers(0, 3), st.sampled_from([1, 2, 7, 40, 90])),
        min_size=1,
        max_size=14,
    ),
    batch_size=st.integers(1, 9),
    name=st.sampled_from(["llama", "gpt2"]),
)
@settings(max_examples=25, deadline=None)
def test_batch_mates_slots_and_budgets_change_nothing(policies, chosen, batch_size, name):
    """Any rows, any number of slots: each is what its request gives alone. Partings at a boundary are counted."""
    policy = policies[name]
    asked = [RolloutInput(prompt, derive_seed(prompt, seed), new) for prompt, seed, new in chosen]
    together = TransformersEngine(policy, batch_size).generate(asked, 1.0)
    partings = sum(parted(policy, row, alone(policy, row, 1.0), out, 1.0) for row, out in zip(asked, together))
    assert partings <= 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_larger_budget_continues_the_same_row(policies, name, temperature):
    policy = policies[name]
    prompts = [RolloutInput(prompt, derive_seed(prompt), new) for prompt in PROMPTS for new in (5, 100)]
    outputs = TransformersEngine(policy, 7).generate(prompts, temperature)
    for short, long in zip(outputs[::2], outputs[1::2]):
        assert long.completion_ids[: len(short.completion_ids)] == short.completion_ids
        assert (short.stop_reason == "eos") == (2 in short.completion_ids)


def test_hundreds_of_rows_pass_through_few_slots(policies):
    """Columns are used several times over, prompts come and go: compared with all rows at once."""
    policy = policies["llama"]
    asked = [
        RolloutInput(PROMPTS[number % len(PROMPTS)], derive_seed("many", number), 3 + number % 60)
        for number in range(200)
    ]
    few = TransformersEngine(policy, 5).generate(asked, 1.0)
    many = TransformersEngine(policy, 256).generate(asked, 1.0)
    partings = sum(parted(policy, row, one, other, 1.0) for row, one, other in zip(asked, few, many, strict=True))
    assert partings <= 2
    assert sum(len(output.completion_ids) for output in few) > 2000


def test_no_two_samples_share_a_seed(tmp_path):
    """Over rounds, run seeds, start states, samples, and further draws of the same start state in one round."""
    seen: set[int] = set()
    count = 0
    for run in range(3):
        for number in range(20):
            request = RolloutsRequest(
                policy=PolicyFiles(base=tmp_path),
                reference=PolicyFiles(base=tmp_path),
                prompt=PlainPrompt(),
                curriculum=NoCurriculum(),
                curriculum_state=None,
                reward=RewardSettings(),
                rl=RLSettings(samples=8, max_new_tokens=5),
                engine=EngineSettings(),
                start_states=tmp_path,
                round=number,
                generated_tokens_so_far=0,
                seed=run,
            )
            starts = [
                Start({"start_state_id": f"item{item}/{stage}"}, [1], 0, first)
                for item in range(12)
                for stage in range(4)
                for first in (0, 8)
            ]
            inputs = sampling_inputs(starts, request, 64)
            seen.update(row.seed for row in inputs)
            count += len(inputs)
    assert count == len(seen) == 3 * 20 * 96 * 8


@given(
    size=st.sampled_from([3000, 2048, 4096, 5001]),
    seed=st.integers(0, 10**6),
    kept=st.floats(0.001, 1.0),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
)
@settings(max_examples=30, deadline=None)
def test_blocks_of_a_large_vocabulary_draw_what_one_sum_draws(size, seed, kept, scale):
    """The token at which the running sum of probabilities passes the draw, and none of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, size, generator=generator) * scale
    logits[torch.rand(6, size, generator=generator) > kept] = -torch.inf
    logits[:, size // 3] = 0.0  # at least one token is possible
    draws = torch.cat([uniforms([seed], 4)[0], torch.tensor([2.0**-49, 1 - 2.0**-49], dtype=torch.float64)])
    tokens, logprobs = sample(logits, 1.0, draws)
    exact = logits.double().log_softmax(-1)
    ends = exact.exp().cumsum(-1)
    for row, (token, draw) in enumerate(zip(tokens.tolist(), draws.tolist())):
        assert logits[row, token] > -torch.inf
        assert logprobs[row].item() == pytest.approx(exact[row, token].item(), abs=1e-5)
        before = ends[row, token].item() - exact[row, token].exp().item()
        assert before - 1e-6 <= draw <= ends[row, token].item() + 1e-6
