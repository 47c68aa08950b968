"""The transformers engine: what it samples, and that nothing it is batched with matters."""

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.seeds import derive_seed
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.rollout.sampling import sample, uniforms
from models.rollout.transformers_engine import TransformersEngine
from models.scoring import TokenRow
from models.settings import LoraTraining, VLLMEngine
from models.settings import TransformersEngine as TransformersSettings
from tests.tiny import save_base, tiny_gpt2, tiny_llama

FRACTION = 2.0**-48


def disturb(policy: Policy, scale: float = 0.15, seed: int = 1) -> Policy:
    torch.manual_seed(seed)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def policy(base):
    return disturb(Policy.load(PolicyFiles(base=base), LoraTraining(rank=4), trainable=True))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return Policy.load(PolicyFiles(base=save_base(tmp_path_factory.mktemp("gpt2"), tiny_gpt2())))


def requests(samples: int = 3, new: int = 40) -> list[RolloutInput]:
    """Groups over nested prefixes of one text, and prompts of their own, with limits of their own."""
    draws = np.random.default_rng(0)
    text = [1, *draws.integers(4, 100, 40).tolist()]
    prompts = [text[:length] for length in (5, 9, 20, 41)]
    prompts += [[1, *draws.integers(4, 100, draws.integers(1, 30)).tolist()] for _ in range(5)]
    return [
        RolloutInput(prompt, derive_seed(0, number, sample), int(draws.integers(1, new)))
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def test_greedy_tokens_are_those_of_generate(policy, gpt2):
    for engine in (TransformersEngine(policy, 7), TransformersEngine(gpt2, 7)):
        inputs = requests(samples=1)
        for request, output in zip(inputs, engine.generate(inputs, 0.0), strict=True):
            ids = torch.tensor([request.prompt_ids])
            expected = engine.policy.network.generate(
                ids, do_sample=False, max_new_tokens=request.max_new_tokens, eos_token_id=2, pad_token_id=0
            )
            assert output.completion_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logprobs_are_the_trainers(policy, gpt2, temperature):
    for chosen in (policy, gpt2):
        inputs = requests()
        outputs = TransformersEngine(chosen, 11).generate(inputs, temperature)
        rows = [TokenRow(request.prompt_ids, output.completion_ids) for request, output in zip(inputs, outputs)]
        with torch.no_grad():
            expected = chosen.completion_logprobs(rows, temperature)
        for output, logprobs in zip(outputs, expected, strict=True):
            torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=1e-5, rtol=0)


def test_grouped_query_attention_of_every_kind(tmp_path):
    for heads in (1, 2, 4):
        model = tiny_llama()
        config = model.config.__class__(**{**model.config.to_dict(), "num_key_value_heads": heads})
        torch.manual_seed(0)
        folder = save_base(tmp_path / str(heads), type(model)(config).eval())
        chosen = Policy.load(PolicyFiles(base=folder))
        inputs = requests(samples=1)
        outputs = TransformersEngine(chosen, 4).generate(inputs, 1.0)
        rows = [TokenRow(request.prompt_ids, output.completion_ids) for request, output in zip(inputs, outputs)]
        for output, logprobs in zip(outputs, chosen.completion_logprobs(rows), strict=True):
            torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_a_request_gives_the_same_row_whatever_it_is_batched_with(policy, batch_size):
    inputs = requests()
    together = TransformersEngine(policy, 64).generate(inputs, 1.0)
    order = np.random.default_rng(1).permutation(len(inputs))
    apart = TransformersEngine(policy, batch_size).generate([inputs[index] for index in order], 1.0)
    for place, index in enumerate(order):
        assert apart[place].completion_ids == together[index].completion_ids
        assert apart[place].stop_reason == together[index].stop_reason


def test_samples_of_a_group_differ_and_the_same_seed_repeats(policy):
    engine = TransformersEngine(policy)
    prompt = [1, 5, 6]
    rows = [RolloutInput(prompt, derive_seed("run", 0, "state", sample), 20) for sample in range(8)]
    outputs = engine.generate(rows, 1.0)
    assert len({tuple(output.completion_ids) for output in outputs}) == 8
    assert engine.generate(rows, 1.0) == outputs


def test_stop_reasons(policy):
    engine = TransformersEngine(policy)
    inputs = requests(samples=8)
    outputs = engine.generate(inputs, 1.0)
    assert {output.stop_reason for output in outputs} == {"eos", "length"}
    for request, output in zip(inputs, outputs):
        if output.stop_reason == "eos":
            assert output.completion_ids[-1] == 2 and 2 not in output.completion_ids[:-1]
        else:
            assert len(output.completion_ids) == request.max_new_tokens and 2 not in output.completion_ids
        assert len(output.logprobs) == len(output.completion_ids)


def test_any_of_several_eos_ids_ends_a_row(tmp_path):
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, *range(60, 70)]
    engine = TransformersEngine(Policy.load(PolicyFiles(base=save_base(tmp_path / "base", model))))
    outputs = engine.generate(requests(samples=4), 1.0)
    ends = {output.completion_ids[-1] for output in outputs if output.stop_reason == "eos"}
    assert len(ends) > 3 and ends <= {2, *range(60, 70)}
    for output in outputs:
        assert not {2, *range(60, 70)} & set(output.completion_ids[:-1])


def test_pad_may_be_eos_or_missing(base, tmp_path):
    model = tiny_llama()
    model.config.pad_token_id = None
    model.generation_config.pad_token_id = None
    other = Policy.load(PolicyFiles(base=save_base(tmp_path / "base", model)))
    inputs = requests()
    expected = TransformersEngine(Policy.load(PolicyFiles(base=base))).generate(inputs, 1.0)
    assert TransformersEngine(other).generate(inputs, 1.0) == expected


def test_stop_strings(policy):
    engine = TransformersEngine(policy)
    inputs = requests()
    free = engine.generate(inputs, 1.0)
    texts = [policy.tokenizer.decode(output.completion_ids, skip_special_tokens=True) for output in free]
    stop = max(texts, key=len)[6:8]  # two characters that some row writes
    for output, text, whole in zip(engine.generate(inputs, 1.0, stop_strings=(stop,)), texts, free, strict=True):
        if stop in text:
            assert output.stop_reason == "stop_string"
            written = policy.tokenizer.decode(output.completion_ids, skip_special_tokens=True)
            assert written == text[: text.index(stop) + len(stop)]
        else:
            assert output == whole


def test_a_model_without_a_finite_distribution_ends_rows_with_error(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    policy = Policy.load(PolicyFiles(base=save_base(tmp_path / "base", model)))
    bad, good = TransformersEngine(policy).generate([RolloutInput([1, 9], 0, 5), RolloutInput([1, 5], 0, 1)], 1.0)
    assert (bad.stop_reason, bad.completion_ids) == ("error", [])
    assert good.stop_reason == "length"


def test_a_prompt_over_the_context_is_refused_by_name(policy):
    engine = TransformersEngine(policy)
    fits = RolloutInput([1] * 250, 0, 6)
    assert len(engine.generate([fits], 0.0)[0].completion_ids) <= 6
    with pytest.raises(UserError, match="row 1 has 251 tokens"):
        engine.generate([fits, RolloutInput([1] * 251, 0, 6)], 0.0)
    with pytest.raises(UserError, match="row 0 asks for 0"):
        engine.generate([RolloutInput([1], 0, 0)], 0.0)
    assert engine.generate([], 1.0) == []


def test_load_adapter_reaches_the_samples(base, policy, tmp_path):
    policy.save(tmp_path / "adapter")
    inputs = requests()
    engine = make_engine(TransformersSettings(batch_size=16), Policy.load(PolicyFiles(base=base)))
    plain = engine.generate(inputs, 1.0)
    assert engine.describe().adapter_hash is None
    engine.load_adapter(tmp_path / "adapter")
    assert engine.describe().adapter_hash == policy.adapter_hash()
    assert engine.generate(inputs, 1.0) == TransformersEngine(policy, 16).generate(inputs, 1.0) != plain
    engine.load_adapter(None)
    assert engine.generate(inputs, 1.0) == plain
    description = engine.describe()
    assert (description.name, description.dtype, description.context) == ("transformers", "float32", 256)


def test_an_engine_samples_with_the_policy_as_it_is_now(base):
    moving = disturb(Policy.load(PolicyFiles(base=base), LoraTraining(rank=4), trainable=True))
    engine = TransformersEngine(moving)
    inputs = requests()
    before = engine.generate(inputs, 1.0)
    disturb(moving, seed=2)
    after = engine.generate(inputs, 1.0)
    assert after != before
    rows = [TokenRow(request.prompt_ids, output.completion_ids) for request, output in zip(inputs, after)]
    for output, logprobs in zip(after, moving.completion_logprobs(rows)):
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=1e-5, rtol=0)
    assert moving.completion_logprobs(rows[:1])[0].requires_grad  # sampling leaves no inference tensors behind


def test_bfloat16_rows_end_and_agree_roughly(tmp_path):
    folder = save_base(tmp_path / "base")
    description = json.loads((folder / "base.json").read_text())
    (folder / "base.json").write_text(json.dumps(description | {"dtype": "bfloat16"}))
    policy = Policy.load(PolicyFiles(base=folder))
    inputs = requests(samples=1)
    outputs = TransformersEngine(policy).generate(inputs, 1.0)
    rows = [TokenRow(request.prompt_ids, output.completion_ids) for request, output in zip(inputs, outputs)]
    for output, logprobs in zip(outputs, policy.completion_logprobs(rows)):
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=0.05, rtol=0)


def test_progress_counts_finished_rows(policy):
    seen = []
    TransformersEngine(policy, 4).generate(requests(), 1.0, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (27, 27) and [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_an_engine_that_is_not_there_is_a_user_error(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"vLLM cannot be imported.*make vllm.*engine.python"):
        make_engine(VLLMEngine(), policy)


def test_uniforms_depend_on_seed_and_position_alone():
    draws = uniforms([3, 2**64 - 1, 3], 5)
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
    assert torch.equal(uniforms([3], 100)[:, :5], draws[:1])
    assert draws.dtype == torch.float64


def test_uniforms_by_hand():
    # SplitMix64's published first output for state 0 is 0xE220A8397B1DCDAF; ours hashes the seed first, mix(0) = 0.
    assert uniforms([0], 1).item() == ((0xE220A8397B1DCDAF >> 16) + 0.5) * FRACTION


def test_uniforms_are_uniform_and_independent():
    draws = uniforms([derive_seed("row", row) for row in range(400)], 50).numpy()
    assert 0 < draws.min() and draws.max() < 1
    counts, _ = np.histogram(draws, 20, (0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-squared, 19 degrees of freedom
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.03


def test_sample_by_hand():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).repeat(4, 1)
    tokens, logprobs = sample(logits, 1.0, torch.tensor([0.1, 0.21, 0.69, 0.71], dtype=torch.float64))
    assert tokens.tolist() == [0, 1, 1, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.2, 0.5, 0.5, 0.3]))
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]]), 0.5, torch.tensor([0.5], dtype=torch.float64))
    assert (tokens.item(), pytest.approx(-0.01815, abs=1e-5)) == (0, logprobs.item())
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]]), 0.0, None)
    assert (tokens.item(), pytest.approx(-0.12693, abs=1e-5)) == (0, logprobs.item())


def test_sampled_shares_follow_the_tempered_distribution():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).repeat(20_000, 1)
    tokens, _ = sample(logits, 0.7, uniforms(list(range(20_000)), 1)[:, 0])
    shares = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.7).softmax(-1), atol=0.012, rtol=0)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.3, 1.0, 2.0]),
)
@settings(max_examples=80, deadline=None)
def test_a_token_of_no_probability_is_never_drawn(values, uniform, temperature):
    logits = torch.tensor([[*values, -torch.inf, -torch.inf]])
    draw = torch.tensor([min(max(uniform, FRACTION / 2), 1 - FRACTION / 2)], dtype=torch.float64)
    token, logprob = sample(logits, temperature, draw)
    assert token.item() < len(values) and logprob.isfinite().all()
