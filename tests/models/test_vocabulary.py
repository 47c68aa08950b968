"""Log-probabilities in chunks over the vocabulary: the numbers and gradients of whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from models import vocabulary
from models.policy import Policy
from models.requests import PolicyFiles
from models.scoring import How, TokenRow, completion_logprobs, padded, token_scores
from models.settings import LoraTraining
from models.vocabulary import LogitTransform, chunked_logprobs, whole_logprobs
from tests.rl import CPU
from tests.tiny import save_base, tiny_gpt2, tiny_llama

ROWS = [TokenRow([1, 5, 9], [7, 8, 127, 2]), TokenRow([1, 4], [31, 32, 0])]


def whole(hidden, weight, bias, targets, transform, temperature):
    """log π and entropies by definition, from all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * (logits / transform.cap).tanh()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 41),
    tokens=st.integers(1, 5),
    transform=st.sampled_from([LogitTransform(), LogitTransform(0.5, 3.0), LogitTransform(2.0)]),
    temperature=st.sampled_from([1.0, 0.6]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_by_definition(vocabulary, chunk, tokens, transform, temperature, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(6, vocabulary, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(tokens, 6, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    parameters = [hidden, *layer.parameters()]
    results = []
    for values in (
        whole(hidden, layer.weight, layer.bias, targets, transform, temperature),
        chunked_logprobs(
            hidden,
            layer,
            targets,
            chunk=chunk,
            transform=transform,
            temperature=temperature,
            entropies="gradient",
        ),
    ):
        logprobs, entropy = values
        loss = (logprobs * torch.arange(1, tokens + 1)).sum() + entropy.square().sum()
        results.append((logprobs, entropy, *torch.autograd.grad(loss, parameters)))
    for found, wanted in zip(*results):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=2e-5)


def test_by_hand():
    """Logits (2, 0) at temperature 0.5: −0.01815 for token 0, −4.01815 for token 1, in chunks of one."""
    layer = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.constant_(layer.weight, 0.0)
    layer.weight.data[0] = 2.0
    logprobs, entropy = chunked_logprobs(torch.ones(2, 1), layer, torch.tensor([0, 1]), chunk=1, temperature=0.5)
    assert logprobs.tolist() == pytest.approx([-0.01815, -4.01815], abs=1e-5)
    p = 0.9820138
    assert entropy.tolist() == pytest.approx([-p * -0.01815 + (1 - p) * 4.01815] * 2, abs=1e-4)


def test_large_logits_neither_overflow_nor_vanish():
    layer = torch.nn.Linear(1, 4, bias=False)
    layer.weight.data[:, 0] = torch.tensor([300.0, -300.0, 299.0, 0.0])
    logprobs, entropy = chunked_logprobs(torch.ones(1, 1), layer, torch.tensor([2]), chunk=1)
    assert logprobs.item() == pytest.approx(-1.31326, abs=1e-4)
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("chunk", [1, 50, 127, 128, 4096])
def test_a_network_in_chunks(chunk):
    """Completions of a Llama, of one with a soft cap and scale, and of GPT-2 with tied weights."""
    for model in (tiny_llama(), tiny_gpt2()):
        results = []
        for vocabulary_chunk in (0, chunk):
            model.zero_grad()
            found = torch.cat(completion_logprobs(model, ROWS, 0.7, vocabulary_chunk=vocabulary_chunk))
            found.sin().sum().backward()
            results.append((found.detach(), [parameter.grad for parameter in model.parameters()]))
        assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
        for one, other in zip(results[0][1], results[1][1]):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * one.abs().max().item())


def test_logits_of_all_tokens_are_never_made(monkeypatch):
    """The output layer makes the logits of one token, and no chunk is larger than asked for."""
    model = tiny_llama()
    sizes = []
    model.lm_head.register_forward_hook(lambda _, __, output: sizes.append(output.shape[:-1].numel()))
    chunks = []
    compute = vocabulary._logits

    def watched(*arguments):
        logits = compute(*arguments)
        chunks.append(logits[0].shape[1])
        return logits

    monkeypatch.setattr(vocabulary, "_logits", watched)
    torch.cat(completion_logprobs(model, ROWS, vocabulary_chunk=50)).sum().backward()
    assert sizes == [1]
    assert chunks == [50, 50, 28, 50, 50, 28]


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 4.0)])
def test_scaled_and_capped_logits_by_configuration(scale, cap):
    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    shared = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    if cap is None:
        model = CohereForCausalLM(CohereConfig(**shared, logit_scale=scale)).eval()
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**shared, final_logit_softcapping=cap)).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    plain, chunked = (torch.cat(completion_logprobs(model, ROWS, vocabulary_chunk=chunk)) for chunk in (0, 30))
    assert torch.allclose(plain, chunked, atol=1e-5)
    assert plain.std() > 0.1


def test_a_model_that_does_something_unknown_to_its_logits_is_refused():
    model = tiny_llama()
    forward = model.forward

    def shifted(*arguments, **inputs):
        output = forward(*arguments, **inputs)
        output.logits = output.logits * 1.5
        return output

    model.forward = shifted
    with pytest.raises(UserError, match="vocabulary_chunk to 0"):
        completion_logprobs(model, ROWS, vocabulary_chunk=50)


def test_an_adapter_on_the_output_layer(tmp_path):
    """Its gradient is that of whole logits."""
    files = PolicyFiles(base=save_base(tmp_path / "base"))
    lora = LoraTraining(rank=2, alpha=4, target_modules=("q_proj", "lm_head"))
    policy = Policy.load(files, lora, CPU, trainable=True, seed=1)
    for name, parameter in policy.trainable_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    results = []
    for chunk in (0, 30):
        found = torch.cat(policy.completion_logprobs(ROWS, vocabulary_chunk=chunk))
        parameters = [parameter for _, parameter in policy.trainable_parameters()]
        results.append((found, *torch.autograd.grad(found.sin().sum(), parameters)))
    for one, other in zip(*results):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_bfloat16_agrees_roughly():
    model = tiny_llama(seed=2).to(torch.bfloat16)
    ids, flat, targets = padded(ROWS)
    plain, chunked = (token_scores(model, ids, flat, targets, How(1.0, "values", chunk)) for chunk in (0, 30))
    assert plain.logprobs_N.dtype == chunked.logprobs_N.dtype == torch.float32
    assert torch.allclose(plain.logprobs_N, chunked.logprobs_N, atol=0.05)
    assert torch.allclose(plain.entropy_N, chunked.entropy_N, atol=0.05)


def test_whole_logits_gradient_is_the_derivative_and_entropies_agree():
    torch.manual_seed(0)
    logits_NV = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets_N = torch.tensor([0, 3, 6, 3, 1])
    assert torch.autograd.gradcheck(lambda x: whole_logprobs(x, targets_N, "values")[0], logits_NV)
    expected_NV = logits_NV.log_softmax(-1)
    entropy_N = -(expected_NV.exp() * expected_NV).sum(-1)
    for entropies in ("none", "values", "gradient"):
        logprobs_N, found_N = whole_logprobs(logits_NV, targets_N, entropies)
        torch.testing.assert_close(logprobs_N, expected_NV[range(5), targets_N])
        assert (found_N is None) == (entropies == "none")
        if found_N is not None:
            torch.testing.assert_close(found_N, entropy_N)
            assert found_N.requires_grad == (entropies == "gradient")
    with torch.no_grad():
        torch.testing.assert_close(whole_logprobs(logits_NV, targets_N, "gradient")[1], entropy_N)
