"""The gated model against PEFT: what must be equal bit for bit, and what up to rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from data.errors import UserError
from models.loracoe.export import export_adapter, one_source
from models.loracoe.gated import GatedLinear, GatedModel
from tests.models.loracoe.helpers import TARGETS, logits, peft_logits, pool_of, relative, write_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three adapters that differ in everything that is allowed: rank, alpha, rsLoRA, patterns, target modules."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "plain": write_adapter(root / "plain", 1),
        "rslora": write_adapter(
            root / "rslora", 2, r=6, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "o_proj"]
        ),
        "patterned": write_adapter(
            root / "patterned",
            3,
            r=2,
            lora_alpha=16,
            rank_pattern={"down_proj": 5},
            alpha_pattern={"0.self_attn.q_proj": 3},
        ),
    }


@pytest.fixture(scope="module")
def pool(folders):
    return pool_of(**folders)


def test_scales_come_from_each_adapters_own_rule(pool):
    layer = pool.modules["model.layers.0.self_attn.q_proj"]
    assert [block.source for block in layer.blocks] == ["plain", "rslora", "patterned"]
    assert [block.scale for block in layer.blocks] == pytest.approx([8 / 4, 3 / 6**0.5, 3 / 2])
    assert layer.scale_R.tolist() == pytest.approx([2.0] * 4 + [3 / 6**0.5] * 6 + [1.5] * 2)
    down = pool.modules["model.layers.1.mlp.down_proj"]
    assert [(block.rank, block.scale) for block in down.blocks] == [(4, 2.0), (5, 16 / 5)]
    assert pool.ranks == 2 * (12 + 6 + 6 + 9)


def test_e2_all_gates_one_is_all_adapters_active(pool, folders):
    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_gates(pool.constant_gates(1.0))
        assert relative(logits(gated.model), peft_logits(*folders.values())) < 1e-6


@pytest.mark.parametrize("name", ["plain", "rslora", "patterned"])
def test_e3_one_hot_gates_are_the_adapter_bit_for_bit(pool, folders, name):
    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_gates(pool.one_hot_gates(name))
        assert torch.equal(logits(gated.model), peft_logits(folders[name]))


@pytest.mark.parametrize("autocast", [True, False])
def test_e3_in_bfloat16(tmp_path, autocast):
    folders = {name: write_adapter(tmp_path / name, seed, torch.bfloat16) for seed, name in enumerate(["a", "b"])}
    pool = pool_of(**folders)
    loaded = PeftModel.from_pretrained(tiny_llama().bfloat16(), folders["b"], autocast_adapter_dtype=autocast)
    with GatedModel(tiny_llama().bfloat16(), pool, None if autocast else torch.bfloat16) as gated:
        gated.set_gates(pool.one_hot_gates("b"))
        assert torch.equal(logits(gated.model), logits(loaded.eval()))


def test_e4_gates_zero_are_the_base_bit_for_bit(pool):
    base = logits(tiny_llama())
    with GatedModel(tiny_llama(), pool) as gated:
        assert torch.equal(logits(gated.model), base)
        gated.set_gates(pool.constant_gates(0.0))
        assert torch.equal(logits(gated.model), base)
        gated.set_gates(pool.constant_gates(1.0))
        assert not torch.equal(logits(gated.model), base)
    assert torch.equal(logits(gated.model), base), "detached"


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_e1_all_gates_one_is_pefts_cat_of_the_deltas(tmp_path, dtype, tolerance):
    folders = {
        name: write_adapter(tmp_path / name, seed, dtype, r=rank)
        for seed, (name, rank) in enumerate([("a", 4), ("b", 6)])
    }
    pool = pool_of(**folders)
    model = PeftModel.from_pretrained(
        tiny_llama().to(dtype), folders["a"], adapter_name="a", autocast_adapter_dtype=False
    )
    model.load_adapter(folders["b"], adapter_name="b", autocast_adapter_dtype=False)
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    name = "model.layers.0.self_attn.q_proj"
    layer = model.base_model.model.get_submodule(name)
    x_BTI = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with GatedModel(tiny_llama().to(dtype), pool, dtype) as gated, torch.no_grad():
        gated.set_gates(pool.constant_gates(1.0))
        assert relative(gated.modules[name](x_BTI), layer.eval()(x_BTI)) <= tolerance
        if dtype == torch.float32:
            assert relative(logits(gated.model), logits(model.eval())) <= tolerance


def random_gates(pool, seed=0, zeros=0.4):
    generator = torch.Generator().manual_seed(seed)
    gates = {}
    for name, module in pool.modules.items():
        values = torch.randn(module.rank, generator=generator)
        values[torch.rand(module.rank, generator=generator) < zeros] = 0
        gates[name] = values
    return gates


@pytest.mark.parametrize("how", ["uniform", "pattern"])
def test_e7_export_reloaded_by_peft_is_the_gated_model(pool, tmp_path, how):
    gates = random_gates(pool)  # negative ones too
    gates["model.layers.0.mlp.down_proj"].zero_()  # a layer without active rank
    exported = export_adapter(pool, gates, tmp_path, how, "base", "card")
    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_gates(gates)
        wanted = logits(gated.model)
    assert relative(peft_logits(tmp_path), wanted) < 1e-6
    assert exported.modules == len(pool.modules) - 1
    assert exported.active_ranks == sum(int(gate.count_nonzero()) for gate in gates.values())
    assert exported.max_lora_rank in (8, 16)


@pytest.mark.parametrize("name", ["plain", "rslora", "patterned"])
def test_e7_exact_export_is_the_adapter_bit_for_bit(pool, folders, tmp_path, name):
    gates = pool.one_hot_gates(name)
    assert one_source(pool, gates) == name
    export_adapter(pool, gates, tmp_path, "exact", "base", "card")
    assert (tmp_path / "adapter_model.safetensors").stat().st_size
    assert torch.equal(peft_logits(tmp_path), peft_logits(folders[name]))


def test_exact_export_refuses_gates_of_more_than_one_adapter(pool, tmp_path):
    with pytest.raises(UserError, match="1 on one adapter"):
        export_adapter(pool, pool.constant_gates(1.0), tmp_path, "exact", "base", "card")


@pytest.mark.parametrize("how", ["uniform", "pattern"])
def test_all_gates_zero_export_the_base(pool, tmp_path, how):
    exported = export_adapter(pool, pool.constant_gates(0.0), tmp_path, how, "base", "card")
    assert exported.active_ranks == 0
    assert torch.equal(peft_logits(tmp_path), logits(tiny_llama()))


def test_e8_and_e12_merged_is_unmerged(pool, tmp_path):
    gates = random_gates(pool, seed=1)
    gated = GatedModel(tiny_llama(), pool)
    gated.set_gates(gates)
    wanted = logits(gated.model)
    export_adapter(pool, gates, tmp_path, "uniform", "base", "card")
    assert relative(logits(gated.merge()), wanted) < 1e-6
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    base = logits(tiny_llama())
    assert relative(logits(loaded.merge_and_unload()), wanted) < 1e-6
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    again.merge_adapter()
    again.unmerge_adapter()
    with again.disable_adapter():
        assert relative(logits(again), base) < 1e-6


def test_merging_gates_that_depend_on_the_input_raises(pool):
    gated = GatedModel(tiny_llama(), pool)
    gated.set_dynamic({name: torch.ones(module.rank) for name, module in pool.modules.items()})
    with pytest.raises(UserError, match="depend on the input"):
        gated.merge()


def test_targets_are_written_as_whole_names(pool, tmp_path):
    export_adapter(pool, pool.constant_gates(0.5), tmp_path, "pattern", "my/base", "card")
    config = PeftModel.from_pretrained(tiny_llama(), tmp_path).peft_config["default"]
    assert config.base_model_name_or_path == "my/base"
    assert set(config.target_modules) == set(pool.modules)
    assert TARGETS[0] not in config.target_modules


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_e8_merged_is_unmerged_up_to_the_dtype(pool, tmp_path, dtype, tolerance):
    """One layer: merging rounds W + delta to the base's dtype, so it is that dtype's rounding and no more."""
    export_adapter(pool, random_gates(pool, seed=4), tmp_path, "pattern", "base", "card")
    name = "model.layers.0.self_attn.q_proj"
    x_BTI = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(tiny_llama().to(dtype), tmp_path).eval()
        wanted = loaded.base_model.model.get_submodule(name)(x_BTI)
        merged = loaded.merge_and_unload().get_submodule(name)(x_BTI)
    assert relative(merged, wanted) < tolerance


def test_pefts_own_svd_merge_at_full_rank_is_the_pool_with_all_gates_one(tmp_path):
    """alpha != r and a mixed rank: PEFT before 0.21.2 merged these at twice the strength."""
    folders = {
        "a": write_adapter(tmp_path / "a", 1, r=4, lora_alpha=8),
        "b": write_adapter(tmp_path / "b", 2, r=6, lora_alpha=3),
    }
    model = PeftModel.from_pretrained(tiny_llama(), folders["a"], adapter_name="a")
    model.load_adapter(folders["b"], adapter_name="b")
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "sum", combination_type="svd", svd_rank=10)
    model.set_adapter("sum")
    pool = pool_of(**folders)
    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_gates(pool.constant_gates(1.0))
        assert relative(logits(gated.model), logits(model.eval())) < 1e-4


def test_a_rslora_source_keeps_its_strength_in_a_mixed_pool(pool, folders):
    """PEFT's `cat` gives such a source sqrt(r) times too much (peft 3761); the pool's delta is the sum of deltas."""
    name = "model.layers.0.self_attn.q_proj"
    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_gates(pool.constant_gates(1.0))
        delta = gated.modules[name].delta_weight()
    wanted = torch.zeros_like(delta)
    for folder in folders.values():
        loaded = PeftModel.from_pretrained(tiny_llama(), folder)
        wanted += loaded.base_model.model.get_submodule(name).get_delta_weight("default").detach()
    assert relative(delta, wanted) < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.3, 2.0]), min_size=12, max_size=12))
def test_any_gates_add_the_weighted_sum_of_rank_components(pool, values):
    name = "model.layers.0.self_attn.q_proj"
    layer, gates_R = pool.modules[name], torch.tensor(values)
    x_BTI = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base = torch.nn.Linear(32, 32, bias=False, dtype=torch.float64)
    gated = GatedLinear(base, layer, torch.float64)
    gated.set_static(gates_R)
    parts = zip(gates_R.double(), layer.scale_R.double(), layer.A_RI.double(), layer.B_OR.T.double(), strict=True)
    wanted = base(x_BTI) + sum(gate * scale * (x_BTI @ a)[..., None] * b for gate, scale, a, b in parts)
    assert torch.allclose(gated(x_BTI), wanted, rtol=0, atol=1e-6)
    assert torch.allclose(base(x_BTI) + x_BTI @ gated.delta_weight().double().T, wanted, rtol=0, atol=1e-5)


def test_another_architecture_with_biases_and_tied_embeddings(tmp_path):
    def qwen():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        model = Qwen2ForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_()
        return model

    folders = {}
    for seed, name in enumerate(["a", "b"]):
        folders[name] = tmp_path / name
        torch.manual_seed(seed + 10)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(qwen(), config).save_pretrained(folders[name])
    pool = pool_of(**folders)
    gates = random_gates(pool, seed=2, zeros=0.2)
    export_adapter(pool, gates, tmp_path / "out", "uniform", "base", "card")
    with GatedModel(qwen(), pool) as gated:
        gated.set_gates(pool.one_hot_gates("b"))
        assert torch.equal(logits(gated.model), peft_logits(folders["b"], model=qwen()))
        gated.set_gates(gates)
        assert relative(logits(gated.model), peft_logits(tmp_path / "out", model=qwen())) < 1e-6
