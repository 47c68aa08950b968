"""What is refused, with the reason: every adapter that would otherwise be silently wrong."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from data.errors import UserError
from models.loracoe.adapters import check_against_base, check_same_base, read_adapter
from models.loracoe.pool import build_pool, load_pool, save_pool
from tests.models.loracoe.helpers import pool_of, write_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "plain", 1)


def edited(folder, target, **config):
    """A copy of the adapter with other values in its configuration."""
    target.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    values = json.loads((target / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    "config,reason",
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "bias of lora_B"),
        ({"bias": "all"}, "biases of the base"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"trainable_token_indices": [1, 2]}, "token embeddings"),
        ({"target_parameters": ["experts.weight"]}, "bare parameters"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"fan_in_fan_out": True}, "Conv1D"),
        ({"init_lora_weights": "pissa"}, "changed base weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "changed base weights"),
        ({"init_lora_weights": "loftq"}, "changed base weights"),
        ({"init_lora_weights": "mica"}, "variant"),
        ({"peft_type": "ADALORA"}, "only LORA"),
        ({"kasa_config": {"beta": 1}}, "LoRA variant"),
        ({"use_qalora": True}, "LoRA variant"),
        ({"alora_invocation_tokens": [5]}, "LoRA variant"),
        ({"some_new_option": 3}, "some_new_option"),
        ({"r": 8}, "rank 4"),
        ({"rank_pattern": {"q_proj": 2}}, "but 2 in"),
    ],
)
def test_refused_configurations(plain, tmp_path, config, reason):
    with pytest.raises(UserError, match=reason):
        read_adapter(edited(plain, tmp_path / "edited", **config), "edited")


@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "eva", False])
def test_initialisations_that_leave_the_base_alone_are_accepted(plain, tmp_path, start):
    assert read_adapter(edited(plain, tmp_path / "edited", init_lora_weights=start), "x").modules


@pytest.mark.parametrize(
    "key,reason",
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "lora_magnitude_vector"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A"),
        ("base_model.model.lm_head.weight", "lm_head"),
    ],
)
def test_refused_tensors(plain, tmp_path, key, reason):
    folder = edited(plain, tmp_path / "edited")
    tensors = load_file(folder / "adapter_model.safetensors") | {key: torch.ones(4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=reason):
        read_adapter(folder, "edited")


def test_refused_files(plain, tmp_path):
    with pytest.raises(UserError, match="no adapter_config"):
        read_adapter(tmp_path, "x")
    folder = edited(plain, tmp_path / "edited")
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle"):
        read_adapter(folder, "x")
    first = next(iter(tensors))
    save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="finite"):
        read_adapter(folder, "x")
    save_file({key: value for key, value in tensors.items() if key != first}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="only; the file is incomplete"):
        read_adapter(folder, "x")


def test_the_base_must_have_every_layer_and_no_more(plain):
    adapter = read_adapter(plain, "x")
    check_against_base(tiny_llama(), adapter)
    with pytest.raises(UserError, match="another model"):
        check_against_base(tiny_llama(layers=1), adapter)
    with pytest.raises(UserError, match="smaller model"):
        check_against_base(tiny_llama(layers=3), adapter)
    with pytest.raises(UserError, match="shape"):
        check_against_base(tiny_llama(hidden=48), adapter)


def test_a_head_tied_to_the_embeddings_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "head", 1, target_modules=["lm_head"])
    adapter = read_adapter(folder, "head")
    model = tiny_llama()
    check_against_base(model, adapter)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(UserError, match="tied"):
        check_against_base(model, adapter)


def test_adapters_that_name_different_bases_are_refused(plain, tmp_path):
    def named(name, base, revision=None):
        (tmp_path / "x").mkdir(exist_ok=True)
        folder = edited(plain, tmp_path / name, base_model_name_or_path=base, revision=revision)
        return read_adapter(folder, name)

    check_same_base(
        [named("same", "org/base"), named("main", "org/base", "main"), named("silent", None)], "org/base", None
    )
    check_same_base([named("folder", str(tmp_path / "x" / ".."))], str(tmp_path), None)
    with pytest.raises(UserError, match="same_base=True"):
        check_same_base([named("other", "org/other")], "org/base", None)
    with pytest.raises(UserError, match="revision v1"):
        check_same_base([named("older", "org/base", "v1")], "org/base", None)


def test_a_dora_adapter_made_by_peft_is_refused(tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="DoRA"):
        read_adapter(tmp_path, "dora")


def test_layers_chosen_by_number_are_fine(tmp_path):
    folder = write_adapter(tmp_path / "top", 1, layers_to_transform=[1])
    adapter = read_adapter(folder, "top")
    check_against_base(tiny_llama(), adapter)
    assert all(".layers.1." in name for name in adapter.modules)


def test_a_pool_is_read_back_as_written(plain, tmp_path):
    other = write_adapter(tmp_path / "other", 2, torch.bfloat16, r=3)
    pool = pool_of(plain=plain, other=other)
    layer = pool.modules["model.layers.0.self_attn.q_proj"]
    assert layer.A_RI.dtype == torch.float32, "the wider dtype holds both"
    assert [block.dtype for block in layer.blocks] == ["float32", "bfloat16"]
    save_pool(pool, tmp_path / "pool")
    again = load_pool(tmp_path / "pool")
    assert again.sources == pool.sources
    for name, module in pool.modules.items():
        assert again.modules[name].blocks == module.blocks
        for kind in ("A_RI", "B_OR", "scale_R"):
            assert torch.equal(getattr(again.modules[name], kind), getattr(module, kind))
    assert pool.sources[0].sha256 != pool.sources[1].sha256


def test_pools_need_names_of_their_own(plain):
    adapter = read_adapter(plain, "x")
    for adapters in ([], [adapter, adapter]):
        with pytest.raises(UserError, match="names of their own"):
            build_pool(adapters)
    with pytest.raises(UserError, match="no adapter 'y'"):
        build_pool([adapter]).one_hot_gates("y")
