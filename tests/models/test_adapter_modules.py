"""Adapters put around a base: copies of the modules, the tensors of the file, and LoRA's products, as PEFT has them."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.adapter_modules import AdaptedModules
from models.lora_linear import LoraLinear, use_lora_products
from models.shared_modules import shared_copy
from tests.tiny import tiny_llama

LAYERS = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def adapted(seed=0, **settings):
    """PEFT's own model with drawn A and B."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=5, target_modules=LAYERS, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(tiny_llama(), config).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    return model


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(3, 20, (3, 7))


def gradients(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.logsumexp(-1).square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_products_and_gradients_are_those_of_peft(ids):
    model = adapted()
    logits, grads = gradients(model, ids)
    use_lora_products(model)
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(layers) == len(LAYERS) * model.config.num_hidden_layers
    found, own = gradients(model, ids)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert list(own) == list(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item(), msg=name)
    assert all(layer.base_layer.weight.grad is None for layer in layers)


def test_gradients_are_derivatives_with_bias_and_frozen_input():
    from models.lora_linear import _LoraProduct

    torch.manual_seed(0)
    x, w, b, a, up = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (3, 4), (3,), (2, 4), (3, 2)))
    for leaf in (x, a, up):
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, up: _LoraProduct.apply(x, w, b, a, up, 0.7), (x, a, up))
    frozen = x.detach()
    assert torch.autograd.gradcheck(lambda a, up: _LoraProduct.apply(frozen, w, None, a, up, 0.7), (a, up))


def test_what_is_not_plain_stays_with_peft(ids):
    for settings in ({"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}):
        model = adapted(**settings)
        use_lora_products(model)
        assert not any(isinstance(module, LoraLinear) for module in model.modules()), settings
    model = adapted()
    plain = tiny_llama()(input_ids=ids).logits
    use_lora_products(model)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(input_ids=ids).logits
    expected = adapted()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(half, expected(input_ids=ids).logits)


@pytest.mark.parametrize("trainable", [False, True])
def test_second_adapter_of_a_configuration_is_as_peft_loads_it(tmp_path, ids, trainable):
    from peft import PeftModel

    base = tiny_llama().requires_grad_(False)
    modules = AdaptedModules(base)
    for seed in (1, 2):
        adapted(seed).save_pretrained(tmp_path / str(seed))
    first = modules.load(tmp_path / "1", trainable)
    assert len(modules.kept) == 1
    for seed in (2, 1):
        model = modules.load(tmp_path / str(seed), trainable)
        own = PeftModel.from_pretrained(shared_copy(base), tmp_path / str(seed), is_trainable=trainable)
        assert [(n, p.requires_grad, p.dtype) for n, p in model.named_parameters()] == [
            (n, p.requires_grad, p.dtype) for n, p in own.named_parameters()
        ]
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))
        assert model.peft_config["default"].to_dict() == own.peft_config["default"].to_dict()
        torch.testing.assert_close(model(input_ids=ids).logits, own(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.zero_()
    assert len(modules.kept) == 1
    assert any(p.abs().max() > 0 for n, p in first.named_parameters() if "lora_B" in n)
    assert not any(hasattr(module, "lora_A") for module in base.modules())
    shared = {id(p) for p in base.parameters()}
    assert all(id(p) in shared or p.is_meta for kept in modules.kept.values() for p in kept.parameters())


def test_another_configuration_or_file_is_not_taken_from_the_kept_modules(tmp_path, ids):
    modules = AdaptedModules(tiny_llama().requires_grad_(False))
    adapted().save_pretrained(tmp_path / "a")
    before = modules.load(tmp_path / "a", False)(input_ids=ids).logits
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 50}))
    assert not torch.allclose(modules.load(tmp_path / "a", False)(input_ids=ids).logits, before)
    assert len(modules.kept) == 2
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: tensor[..., :2].contiguous() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(RuntimeError, match="size mismatch"):
        modules.load(tmp_path / "a", False)


def test_shared_copy_is_what_deepcopy_makes(ids):
    model = adapted()
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    ours, theirs = shared_copy(model), copy.deepcopy(model, memo)
    assert str(ours) == str(theirs)
    for one, two, original in zip(ours.modules(), theirs.modules(), model.modules(), strict=True):
        assert list(vars(one)) == list(vars(two))
        assert all(type(vars(one)[name]) is type(vars(two)[name]) for name in vars(two))
        assert one is not original and one._forward_hooks is not original._forward_hooks
    assert ours.peft_config is ours.base_model.peft_config is not model.peft_config
    assert all(p is q for p, q in zip(ours.parameters(), model.parameters(), strict=True))
    assert torch.equal(ours(input_ids=ids).logits, model(input_ids=ids).logits)
    chosen = next(model.parameters())
    other = shared_copy(model, {id(chosen)})
    copied = next(other.parameters())
    assert copied is not chosen and torch.equal(copied, chosen)
