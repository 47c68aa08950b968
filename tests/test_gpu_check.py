"""`make gpu-check` on a CPU: small, every part of it."""

import json

from benchmarks.gpu_check import gpu_presets, main
from data.errors import UserError


def test_gpu_check_on_a_cpu(tmp_path, capsys):
    """Both dtypes of the engine and a round of every GPU preset work, and the figures are written down."""
    assert main(["--out", str(tmp_path), "--device", "cpu", "--without-vllm"]) == 0
    found = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert {"llama3.2-1b", "qwen2.5-1.5b", "llama2-7b", "llama3.1-8b"} <= set(gpu_presets())
    assert {"transformers float32", "transformers bfloat16", *(f"preset {n}" for n in gpu_presets())} <= set(found)
    assert found["transformers float32"]["logprob_difference_max"] < 1e-5
    assert found["transformers float32"]["greedy_margin_max"] < 1e-4
    assert found["preset llama2-7b"]["parameters"] == "full"
    for result in found.values():
        assert result["ok"] and result["logprob_difference_mean"] < 0.1
    text = (tmp_path / "gpu-check.txt").read_text()
    assert "tokens_per_second" in text and "FAILED" not in text and text in capsys.readouterr().out


def test_what_fails_is_written_down_and_the_rest_runs(tmp_path, monkeypatch):
    """A preset whose round fails costs its own line, not the others'."""

    def broken(*_):
        raise OSError("no such disk")

    def broken_find(*_):
        raise UserError("vLLM is not installed here")

    monkeypatch.setattr("benchmarks.gpu_check.check_preset", broken)
    monkeypatch.setattr("benchmarks.gpu_check.find", broken_find)
    assert main(["--out", str(tmp_path), "--device", "cpu", "--preset", "llama3.2-1b"]) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert found["preset llama3.2-1b"]["error"] == "OSError: no such disk"
    assert found["transformers float32"]["ok"]
    assert found["vllm in process"]["skipped"] == "vLLM is not installed here"
    assert "FAILED preset llama3.2-1b: OSError: no such disk" in (tmp_path / "gpu-check.txt").read_text()
