"""An exported model loads elsewhere and is the policy that it was made from."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.errors import UserError
from data.progress import Silent
from data.settings import PlainPrompt
from models.export import export
from models.policy import Policy
from models.requests import ExportRequest, PolicyFiles
from models.settings import FullTraining
from tests.rl import CPU, LORA
from tests.tiny import save_base, tiny_llama

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    folder = tmp_path_factory.mktemp("policy")
    base = save_base(folder / "base", tiny_llama())
    policy = Policy.load(PolicyFiles(base=base), LORA, CPU, trainable=True, seed=1)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    policy.save(folder / "adapter")
    return PolicyFiles(base=base, weights=folder / "adapter")


def request(files: PolicyFiles, **named) -> ExportRequest:
    facts = {"decision": "the 95 % interval lies above 0"}
    return ExportRequest(policy=files, title="t, version 3", prompt=PlainPrompt(), facts=facts, compute=CPU, **named)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_an_adapter_names_the_base_that_is_given_and_loads_on_it(files, tmp_path):
    assert export(request(files, base_name="org/base"), tmp_path, Silent()) == {"kind": "adapter", "base": "org/base"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    base = AutoModelForCausalLM.from_pretrained(files.base / "model")
    expected = logits(Policy.load(files, compute=CPU).model)
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(tmp_path)).eval()), expected)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nbase_model: org/base\n") and "| decision | the 95 % interval lies above 0 |" in text
    assert "adapter_model.safetensors" in text


def test_merged_weights_are_a_whole_model_with_its_tokenizer(files, tmp_path):
    assert export(request(files, merge=True), tmp_path, Silent())["kind"] == "model"
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(model), logits(Policy.load(files, compute=CPU).model), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path) is not None
    assert not (tmp_path / "adapter_config.json").exists()


def test_full_weights_are_exported_whole(files, tmp_path):
    policy = Policy.load(PolicyFiles(base=files.base), FullTraining(), CPU, trainable=True)
    policy.save(tmp_path / "full")
    (tmp_path / "out").mkdir()
    made = export(request(PolicyFiles(base=files.base, weights=tmp_path / "full")), tmp_path / "out", Silent())
    assert made["kind"] == "model" and any(Path(tmp_path / "out").glob("*.safetensors"))


def test_the_base_is_nothing_to_export(files, tmp_path):
    with pytest.raises(UserError, match="nothing to export"):
        export(request(PolicyFiles(base=files.base)), tmp_path, Silent())
