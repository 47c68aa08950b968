"""The transformers engine over the families of models, adapters, gates: greedy ids of `generate`, trainer's numbers."""

import json

import numpy as np
import pytest
import torch
import transformers

from data.seeds import derive_seed
from models.loracoe.examples import Example, make_batch
from models.loracoe.gated import GatedModel
from models.loracoe.routers import SequenceGates, SequenceRouter, TokenRouter, prompt_states
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout import transformers_engine
from models.rollout.direct import DirectStep, decodes_directly
from models.rollout.engine import RolloutInput
from models.rollout.steps import ModelStep
from models.rollout.transformers_engine import TransformersEngine
from models.scoring import TokenRow
from models.settings import LoraTraining
from tests.models.loracoe.helpers import pool_of, write_adapter
from tests.tiny import save_base, tiny_gpt2, tiny_llama

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
DIRECT = {
    "llama": ("Llama", SHAPE | {"num_key_value_heads": 1}),
    "llama_with_biases": ("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        "Llama",
        GROUPED
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", GROUPED | {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
}
GENERAL = {
    "gpt_neox": ("GPTNeoX", SHAPE | {"rotary_pct": 0.25}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 8}),
    "phi": ("Phi", SHAPE | {"partial_rotary_factor": 0.5}),
}
FAMILIES = [*DIRECT, *GENERAL, "gpt2"]


def model_of(family: str):
    if family == "gpt2":
        return tiny_gpt2()
    name, shape = (DIRECT | GENERAL)[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape)).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("weight" in parameter_name), std=0.2)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = save_base(tmp_path_factory.mktemp(family), model_of(family))
        return made[family]

    return folder


def rows(seed: int = 0, prompts: int = 6, samples: int = 2, new: int = 24) -> list[RolloutInput]:
    """Groups over nested prefixes of one text, and prompts of their own."""
    draws = np.random.default_rng(seed)
    text = [1, *draws.integers(4, 100, 40).tolist()]
    found = [text[: draws.integers(2, 40)] for _ in range(prompts // 2)]
    found += [[1, *draws.integers(4, 100, draws.integers(1, 30)).tolist()] for _ in range(prompts - prompts // 2)]
    return [
        RolloutInput(prompt, derive_seed(seed, number, sample), int(draws.integers(new // 2, new + 1)))
        for number, prompt in enumerate(found)
        for sample in range(samples)
    ]


def scored(policy, asked, outputs):
    token_rows = [TokenRow(row.prompt_ids, output.completion_ids) for row, output in zip(asked, outputs)]
    with torch.no_grad():
        return policy.completion_logprobs(token_rows)


def assert_trainers_numbers(policy, asked, outputs, tolerance=2e-5):
    for output, logprobs in zip(outputs, scored(policy, asked, outputs), strict=True):
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=tolerance, rtol=0)


def generated(policy, asked):
    """Greedy ids by `generate`, all rows at once on the left-padded batch, cut at each row's limit."""
    width, new = max(len(row.prompt_ids) for row in asked), max(row.max_new_tokens for row in asked)
    ids = torch.tensor([[0] * (width - len(row.prompt_ids)) + list(row.prompt_ids) for row in asked])
    seen = torch.tensor([[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in asked])
    with torch.no_grad():
        whole = policy.network.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=new, eos_token_id=2, pad_token_id=0
        )
    found = []
    for row, completion in zip(asked, whole[:, width:].tolist(), strict=True):
        end = completion.index(2) + 1 if 2 in completion else new
        found.append(completion[: min(end, row.max_new_tokens)])
    return found


def largest_parting_margin(policy, asked, ones, others) -> float:
    """The largest top-2 margin where two greedy rows part; 0 where none does."""
    largest = 0.0
    for row, one, other in zip(asked, ones, others, strict=True):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
            with torch.no_grad():
                logits_NV, _ = policy.completion_logits([TokenRow(row.prompt_ids, one[: place + 1])])
            best = logits_NV[-1].topk(2).values
            largest = max(largest, (best[0] - best[1]).item())
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_generate_and_logprobs_the_trainers(folders, family):
    policy = Policy.load(PolicyFiles(base=folders(family)))
    assert decodes_directly(policy.network) == (family in DIRECT)
    asked = rows()
    engine = TransformersEngine(policy, 5)
    greedy = engine.generate(asked, 0.0)
    assert largest_parting_margin(policy, asked, [o.completion_ids for o in greedy], generated(policy, asked)) < 1e-4
    assert len({tuple(output.completion_ids) for output in greedy}) > 3  # no constant model
    assert_trainers_numbers(policy, asked, engine.generate(asked, 1.0))


@pytest.mark.parametrize("family", sorted(DIRECT))
def test_both_ways_of_decoding_give_the_same_rows(folders, family, monkeypatch):
    policy = Policy.load(PolicyFiles(base=folders(family)))
    asked = rows(seed=3)
    direct = TransformersEngine(policy, 4).generate(asked, 0.9)
    monkeypatch.setattr(transformers_engine, "decodes_directly", lambda network: False)
    general = TransformersEngine(policy, 4).generate(asked, 0.9)
    for one, other in zip(direct, general, strict=True):
        assert (one.completion_ids, one.stop_reason) == (other.completion_ids, other.stop_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_subclass_is_decoded_by_its_own_forward_pass():
    class Halved(transformers.LlamaForCausalLM):
        """Does something of its own to the logits."""

    assert decodes_directly(tiny_llama()) and not decodes_directly(Halved(tiny_llama().config))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_bfloat16_agrees_roughly_with_an_adapter_beside_the_weights(folders, family, tmp_path):
    policy = Policy.load(PolicyFiles(base=folders(family)))
    base = save_base(tmp_path / "base", policy.network.to(torch.bfloat16))
    description = json.loads((base / "base.json").read_text())
    (base / "base.json").write_text(json.dumps(description | {"dtype": "bfloat16"}))
    targets = {"gpt2": ("c_attn",), "gpt_neox": ("query_key_value",)}.get(family, ("q_proj", "down_proj"))
    adapted = Policy.load(PolicyFiles(base=base), LoraTraining(rank=4, target_modules=targets), trainable=True)
    torch.manual_seed(1)
    for _, parameter in adapted.trainable_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if family == "gpt2" else 0.1)  # its own weights are small
    asked = rows()
    outputs = TransformersEngine(adapted, 5).generate(asked, 1.0)
    plain = torch.cat(scored(Policy.load(PolicyFiles(base=base)), asked, outputs))
    found = torch.cat(scored(adapted, asked, outputs))
    sampled = torch.cat([torch.tensor(output.logprobs) for output in outputs])
    assert (sampled - found).abs().mean() < 0.05 < (plain - found).abs().mean()


def test_gates_of_tokens_and_of_tasks_are_sampled_with(folders, tmp_path):
    """A pool of adapters in place of the layers: static gates, then a router that reads every token."""
    pool = pool_of(**{name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(["a", "b"])})
    plain = Policy.load(PolicyFiles(base=save_base(tmp_path / "base")))
    asked = rows()
    before = TransformersEngine(plain, 5).generate(asked, 1.0)
    seen = [before]
    gated = GatedModel(plain.network, pool)
    gated.set_gates(pool.constant_gates(0.7))
    for install in (lambda: None, lambda: TokenRouter(pool, active=2).install(gated)):
        install()
        outputs = TransformersEngine(plain, 5).generate(asked, 1.0)
        assert_trainers_numbers(plain, asked, outputs)
        assert outputs not in seen
        seen.append(outputs)
    gated.detach()
    assert TransformersEngine(plain, 5).generate(asked, 1.0) == before


def test_rows_keep_the_gates_of_their_prompt(folders, tmp_path):
    """A sequence router: every row is what the trainer scores with the gates of its own prompt, in any slot."""
    pool = pool_of(**{name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(["a", "b"])})
    policy = Policy.load(PolicyFiles(base=save_base(tmp_path / "base")))
    gated = GatedModel(policy.network, pool)
    router = SequenceRouter(32, pool)
    torch.nn.init.normal_(router.linear.weight, std=2.0)
    asked = rows(prompts=8)
    outputs = TransformersEngine(policy, 5, SequenceGates(gated, router)).generate(asked, 1.0)
    gates = []
    for row, output in zip(asked, outputs, strict=True):
        batch = make_batch([Example(row.prompt_ids, ())], torch.device("cpu"))
        gates.append(next(iter(router(prompt_states(gated, batch)).values())))
        with torch.no_grad():
            router.install(gated, batch)
        assert_trainers_numbers(policy, [row], [output])
    assert max((one - gates[0]).abs().max() for one in gates) > 0.1  # prompts have different gates


def test_greedy_ids_with_an_adapter_are_those_of_generate_on_200_prompts(folders):
    policy = Policy.load(PolicyFiles(base=folders("qwen2")), LoraTraining(rank=4), trainable=True)
    torch.manual_seed(2)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    asked = rows(seed=8, prompts=200, samples=1, new=16)
    ours = [output.completion_ids for output in TransformersEngine(policy, 48).generate(asked, 0.0)]
    theirs = generated(policy, asked)
    assert largest_parting_margin(policy, asked, ours, theirs) < 1e-4
    assert sum(one != other for one, other in zip(ours, theirs)) <= 4
    assert len({tuple(ids) for ids in ours}) > 50


@pytest.mark.parametrize("way", [DirectStep, ModelStep])
def test_a_row_without_finite_numbers_harms_no_other(tmp_path, monkeypatch, way):
    """Neither those in its batch nor those that get its slot after it."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    policy = Policy.load(PolicyFiles(base=save_base(tmp_path / "base", model)))
    monkeypatch.setattr(transformers_engine, "decodes_directly", lambda network: way is DirectStep)
    asked = [RolloutInput([1, 5, 6], seed, 30) for seed in range(6)]
    asked += [RolloutInput([1, 30, 9], seed, 30) for seed in range(6)]
    asked += [RolloutInput([1, 7, *[8] * (seed % 3)], seed, 30) for seed in range(12)]
    alone = [TransformersEngine(policy).generate([row], 1.0)[0] for row in asked]
    reasons = {output.stop_reason for output in alone[:6] + alone[12:]}
    assert "error" in reasons and reasons > {"error"}  # some sample the token 9, some do not
    for batch_size in (2, 7):
        together = TransformersEngine(policy, batch_size).generate(asked, 1.0)
        assert [(o.completion_ids, o.stop_reason) for o in together] == [
            (o.completion_ids, o.stop_reason) for o in alone
        ]
