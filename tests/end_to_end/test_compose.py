"""`ratchet compose` as its user types it: adapters made by PEFT on a saved model, demonstrations in a file."""

import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.evaluated import gsm8k_file
from tests.models.loracoe.helpers import logits, write_adapter
from tests.tiny import character_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model's folder, two adapters that name it, and demonstrations of two tasks."""
    root = tmp_path_factory.mktemp("compose")
    tiny_llama().save_pretrained(root / "model")
    character_tokenizer().save_pretrained(root / "model")
    for seed, name in enumerate(["sums", "doubles"]):
        folder = write_adapter(root / name, seed)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(root / "model")
        (folder / "adapter_config.json").write_text(json.dumps(config))
    for name, sign in (("sums", "plus"), ("doubles", "twice")):
        rows = [{"question": f"{n} {sign} {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(1, 25)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def ratchet(place, *arguments, command="compose"):
    command = [sys.executable, "-m", "flows", command, *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)


COMMON = ["sums", "doubles", "--tasks", "sums=sums.jsonl", "doubles=doubles.jsonl", "--validation", "4"]


def test_adapters_of_anyone_are_composed_and_served_by_peft(place):
    done = ratchet(
        place, *COMMON, "--out", "done", "--router", "sequence", "--router.steps", "8", "--steps", "4", "--threads", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "2 adapters, 6 layers, 48 ranks" in done.stdout and "--max-lora-rank 8" in done.stdout
    assert "sequence router" in done.stdout
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    plain = logits(base)
    for task in ("sums", "doubles"):
        adapter = place / "done" / "exported" / task
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(place / "model")
        assert not torch.allclose(logits(PeftModel.from_pretrained(tiny_llama(), adapter).eval()), plain)
    gsm8k_file(place / "test.jsonl", 3)
    asked = ["--benchmark", "gsm8k", "--file", "test.jsonl", "--max-new-tokens", "4", "--threads", "1"]
    answered = ratchet(place, "done", *asked, "--out", "answers", command="evaluate")
    assert answered.returncode == 0, answered.stderr
    score = json.loads((place / "answers" / "score.json").read_text())
    assert score["made_from"]["engine"]["adapter_hash"] and score["made_from"]["base"]["dtype"] == "float32"
    served = ratchet(
        place, "done", *asked, "--engine", "vllm_server", "--url", "http://127.0.0.1:1", command="evaluate"
    )
    assert served.returncode == 2 and "one fixed adapter a request" in served.stderr
    again = ratchet(place, *COMMON, "--out", "done", "--steps", "0", "--threads", "1")
    assert again.returncode == 0 and not (place / "done" / "router").exists(), "the whole result is replaced"
    unrouted = ratchet(place, "done", *asked, command="evaluate")
    assert unrouted.returncode == 2 and "composed without a router" in unrouted.stderr


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["nowhere", "--tasks", "sums=sums.jsonl"], "holds no adapter_config.json"),
        (["sums", "--tasks", "sums.jsonl"], "give NAME=FILE"),
        (["sums", "--tasks", "sums=missing.jsonl"], "is no file"),
        (["sums", "a/../sums", "--tasks", "sums=sums.jsonl"], "used twice"),
        (["sums", "--tasks", "s=suite:nothing"], "no suite 'nothing'"),
        (["sums", "--tasks", "sums=sums.jsonl", "--export", "exact"], "--export"),
        (["sums", "--tasks", "sums=sums.jsonl", "--router.kind", "mixture"], "--router.kind"),
        (["sums", "--tasks", "sums=sums.jsonl", "--rooter", "token"], "did you mean 'router'"),
        (["sums", "--tasks", "sums=sums.jsonl", "--base", "./nothing"], "is not there"),
        (["sums", "--tasks", "sums=sums.jsonl", "--out", "model"], "is no composition"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(place, arguments, said):
    done = ratchet(place, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1
