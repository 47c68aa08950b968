"""Sampled tokens per CPU second: our engine and transformers' `generate` in alternation, one thread, the same rows.

    python -m benchmarks.rollouts [--model tiny|flat|smol] [--repeats 5] [--continuous] [--url URL]

`tiny`: a random Llama of 1.1 M parameters, 64 rows over 8 questions and four nested start states of each, as R³ asks
for them, up to 64 new tokens; `flat`: the same with 8 rows for each of 8 short prompts. `smol`: SmolLM2-135M-Instruct
(`make smol`) with 64 rows over 8 word problems and their start states; skipped with a reason where it is absent.

The rows' ends are spread: the random model ends a row at any of several EOS ids, so that the mean row has a bit under
half the tokens of the longest one, as in docs/results/smol-first.md. Before anything is timed, the greedy ids of both
are compared. Memory is measured in a process of its own for each. `--continuous` adds transformers' own continuous
batching; `--url` adds vLLM servers of the same model (which compute elsewhere: compare wall times). Prints JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from data.seeds import derive_seed
from data.settings import ChatPrompt
from models.fetch import SMOL, smol_problem
from models.policy import Policy
from models.requests import Device, PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.rollout.transformers_engine import TransformersEngine
from models.scoring import TokenRow
from models.settings import Engine
from models.tokenization import encode_demonstration

ROWS, QUESTIONS, NEW, PAGE = 64, 8, 64, 16
BARS = {"tiny": 3.0, "flat": None, "smol": 1.5}
"""Tokens per CPU second, ours to `generate`'s, that this project asks of itself."""


class Work(NamedTuple):
    """A policy and the rows to sample from it."""

    policy: Policy
    rows: list[RolloutInput]


def main() -> None:
    """Measures the models asked for and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=["tiny", "flat", "smol"], action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--url", help="vLLM servers of the same model, with commas between them")
    parser.add_argument("--continuous", action="store_true", help="transformers' own continuous batching as well")
    parser.add_argument("--memory-of", choices=["ours", "generate"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in arguments.model or ["tiny", "flat", "smol"]:
        problem = smol_problem() if name == "smol" else None
        if problem:
            print(f"smol is skipped: {problem}", file=sys.stderr)
            found[name] = {"skipped": problem}
            continue
        with tempfile.TemporaryDirectory() as folder:
            work = make_work(name, Path(folder), arguments.device)
            if arguments.memory_of:
                print(memory(work, arguments.memory_of, arguments.temperature))
                return
            found[name] = measure(name, work, arguments)
    print(json.dumps(found, indent=1))


def make_work(name: str, folder: Path, device: str) -> Work:
    """The work that is called `name`."""
    return smol(folder, device) if name == "smol" else tiny(folder, device, flat=name == "flat")


def tiny(folder: Path, device: str = "cpu", flat: bool = False) -> Work:
    """A random Llama of 1.1 M parameters that ends rows at 10 of its 512 ids; 8 questions of 48 tokens.

    Each with nested start states that reveal 0, 16, 32 and 48 tokens; `flat`: 8 prompts of 32 tokens, 8 rows each.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,  # as drawn by default, greedy rows soon repeat one token
        bos_token_id=1,
        eos_token_id=list(range(2, 12)),
        pad_token_id=0,
    )
    network = LlamaForCausalLM(config).eval()
    (folder / "model").mkdir()
    network.save_pretrained(folder / "model")
    bare_tokenizer(512).save_pretrained(folder / "model")
    base = {"kind": "tiny", "name": "model", "revision": None, "dtype": "float32", "context": None}
    (folder / "base.json").write_text(json.dumps(base))
    draws = torch.Generator().manual_seed(1)
    texts = [[1, *torch.randint(12, 512, (95,), generator=draws).tolist()] for _ in range(QUESTIONS)]
    prompts = [text[:32] for text in texts] if flat else [text[:end] for text in texts for end in (48, 64, 80, 96)]
    policy = Policy.load(PolicyFiles(base=folder), compute=Device(device=device, threads=1))
    return Work(policy, rows_of(prompts, ROWS // len(prompts)))


def bare_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of words w0, w1, ...: nothing here reads text, but a base folder has one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")


def smol(folder: Path, device: str = "cpu") -> Work:
    """SmolLM2-135M-Instruct, 8 word problems, and of each the question and three nested prefixes of its solution."""
    base = {"kind": "pretrained", "name": SMOL, "revision": None, "dtype": "float32", "context": None}
    (folder / "base.json").write_text(json.dumps(base))
    policy = Policy.load(PolicyFiles(base=folder), compute=Device(device=device, threads=1))
    prompts = []
    for number in range(QUESTIONS):
        have, more, gone = 3 + number, 7 + 2 * number, 2 + number
        question = (
            f"Tom has {have} apples. He picks {more} more in the garden and gives {gone} of them to his sister. "
            "How many apples does Tom have now?"
        )
        steps = [
            f"Tom starts with {have} apples and picks {more} more, so he has {have} + {more} = {have + more} apples.\n",
            f"He gives {gone} of them to his sister, so {have + more} - {gone} = {have + more - gone} are left.\n",
            f"Nothing else happens to the apples, so Tom has {have + more - gone} apples now.\n",
            f"The answer is {have + more - gone}.",
        ]
        encoded = encode_demonstration(policy.tokenizer, question, "".join(steps), ChatPrompt())
        for revealed in range(4):
            characters = len("".join(steps[:revealed]))
            count = sum(end <= characters for _, end in encoded.offsets[:-1])
            prompts.append(encoded.prompt_ids + encoded.response_ids[:count])
    return Work(policy, rows_of(prompts, ROWS // len(prompts)))


def rows_of(prompts: Sequence[Sequence[int]], samples: int) -> list[RolloutInput]:
    """`samples` rows of each prompt, each with a seed of its own."""
    return [
        RolloutInput(prompt, derive_seed("benchmark", number, sample), NEW)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def ours(work: Work, temperature: float) -> list[list[int]]:
    """Sampled ids of every row, by the engine of this project."""
    return [output.completion_ids for output in TransformersEngine(work.policy).generate(work.rows, temperature)]


def generate(work: Work, temperature: float) -> list[list[int]]:
    """Sampled ids of every row, by one call of transformers' `generate` on left-padded prompts."""
    width = max(len(row.prompt_ids) for row in work.rows)
    ids = torch.tensor([[0] * (width - len(row.prompt_ids)) + list(row.prompt_ids) for row in work.rows])
    seen = torch.tensor([[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in work.rows])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    ends = sorted(work.policy.eos_ids)
    with torch.inference_mode():
        whole = work.policy.network.generate(
            ids.to(work.policy.device),
            attention_mask=seen.to(work.policy.device),
            max_new_tokens=NEW,
            eos_token_id=ends,
            pad_token_id=ends[0],
            **({"do_sample": False} | sampling),
        )
    return [until_end(row, work.policy.eos_ids) for row in whole[:, width:].tolist()]


def continuous(work: Work, temperature: float) -> list[list[int]]:
    """Sampled ids of every row, by transformers' own continuous batching (on a CPU its cache must be sized by hand)."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    ends = sorted(work.policy.eos_ids)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=NEW, eos_token_id=ends, pad_token_id=ends[0], **({"do_sample": False} | sampling)
    )
    pages = sum(-(-(len(row.prompt_ids) + NEW) // PAGE) for row in work.rows)
    with torch.no_grad():  # it refuses to run under inference_mode
        outputs = work.policy.network.generate_batch(
            inputs=[list(row.prompt_ids) for row in work.rows],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=pages, page_size=PAGE, max_batch_tokens=1024
            ),
            warmup=False,
        )
    ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
    return [until_end(output.generated_tokens, work.policy.eos_ids) for output in ordered]


def servers(url: str, work: Work) -> Callable[[Work, float], list[list[int]]]:
    """Sampled ids of every row by the vLLM servers at `url` (several: with commas between them)."""
    settings = TypeAdapter(Engine).validate_python({"kind": "vllm_server", "urls": url.split(",")})
    engine = make_engine(settings, work.policy)
    return lambda work, temperature: [row.completion_ids for row in engine.generate(work.rows, temperature)]


def until_end(ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    """`ids` up to the first EOS, which is kept."""
    for index, token in enumerate(ids):
        if token in ends:
            return list(ids[: index + 1])
    return list(ids)


def same_greedy_ids(work: Work) -> dict[str, Any]:
    """How many greedy rows of the two are the same, and the largest top-2 margin where one parts (bar: 1e-4)."""
    mine, theirs = ours(work, 0.0), generate(work, 0.0)
    margins = []
    for row, one, other in zip(work.rows, mine, theirs, strict=True):
        if one != other:
            place = next(i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
            with torch.no_grad():
                logits_NV, _ = work.policy.completion_logits([TokenRow(row.prompt_ids, one[: place + 1])])
            best = logits_NV[-1].topk(2).values
            margins.append((best[0] - best[1]).item())
    return {"same": len(mine) - len(margins), "rows": len(mine), "largest_margin": max(margins, default=0.0)}


def measure(name: str, work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy agreement, then tokens per CPU second of each in alternation, their ratio, the limit, and memory."""
    greedy = same_greedy_ids(work)
    if greedy["largest_margin"] > 1e-4:
        raise SystemExit(f"{name}: greedy ids differ where the margin is {greedy['largest_margin']}")
    contestants: dict[str, Callable[[Work, float], list[list[int]]]] = {"ours": ours, "generate": generate}
    if arguments.continuous:
        contestants["continuous_batching"] = continuous
    if arguments.url:
        contestants["vllm_server"] = servers(arguments.url, work)
    speeds: dict[str, list[float]] = {key: [] for key in contestants}
    wall: dict[str, list[float]] = {key: [] for key in contestants}
    lengths: list[int] = []
    for repeat in range(arguments.repeats + 1):
        for key, contestant in contestants.items():
            began, wall_began = time.process_time(), time.perf_counter()
            ids = contestant(work, arguments.temperature)
            seconds, wall_seconds = time.process_time() - began, time.perf_counter() - wall_began
            tokens = sum(map(len, ids))
            if key == "ours":
                lengths = list(map(len, ids))
            if repeat:  # the first one warms up
                speeds[key].append(tokens / seconds)
                wall[key].append(tokens / wall_seconds)
    median = {key: statistics.median(values) for key, values in speeds.items()}
    result = {
        "parameters": sum(parameter.numel() for parameter in work.policy.network.parameters()),
        "lengths": {"mean": statistics.mean(lengths), "min": min(lengths), "max": max(lengths)},
        "greedy": greedy,
        "tokens_per_cpu_second": {key: round(value, 1) for key, value in median.items()},
        "tokens_per_second": {key: round(statistics.median(values), 1) for key, values in wall.items()},
        "ratio": round(median["ours"] / median["generate"], 2),
        "bar": BARS[name],
        "limit_tokens_per_cpu_second": round(sum(lengths) / physical_limit(work, lengths), 1),
        "peak_memory_MB_beside_the_model": {key: memory_of(name, key, arguments) for key in ("ours", "generate")},
    }
    if arguments.url:
        ratio = statistics.median(wall["ours"]) / statistics.median(wall["vllm_server"])
        result["ratio_to_vllm_by_wall_time"] = round(ratio, 2)
    return result


def physical_limit(work: Work, lengths: Sequence[int]) -> float:
    """CPU seconds that these rows' matrix products and key/value reads take alone: nothing could be faster.

    Every distinct prompt token once, then steps over exactly the live rows; weights as plain matrix products, keys and
    values at the speed at which this machine reads memory. Attention scores, norms, sampling and Python are left out.
    """
    matrices = [m.weight.detach() for m in work.policy.network.modules() if isinstance(m, torch.nn.Linear)]
    counts = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    seen: set[tuple[int, ...]] = set()
    for row in work.rows:
        seen.update(tuple(row.prompt_ids[: end + 1]) for end in range(len(row.prompt_ids)))
    seconds = products(matrices, min(256, len(seen))) * len(seen) / min(256, len(seen))
    known: dict[int, float] = {}
    for count in counts:
        if count not in known:
            known[count] = products(matrices, count)
        seconds += known[count]
    config = work.policy.network.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4
    read = sum(
        (len(row.prompt_ids) + step) * per_token for row, length in zip(work.rows, lengths) for step in range(1, length)
    )
    return seconds + read / bandwidth()


def products(matrices: Sequence[torch.Tensor], rows: int) -> float:
    """CPU seconds of `rows` inputs times every matrix, the fastest of several."""
    inputs = {matrix.shape[1]: torch.randn(rows, matrix.shape[1]) for matrix in matrices}
    best = float("inf")
    for _ in range(4):
        began = time.process_time()
        for matrix in matrices:
            torch.nn.functional.linear(inputs[matrix.shape[1]], matrix.cpu())
        best = min(best, time.process_time() - began)
    return best


def bandwidth() -> float:
    """Bytes a second that one thread reads."""
    block = torch.randn(1 << 24)
    best = float("inf")
    for _ in range(4):
        began = time.process_time()
        block.sum()
        best = min(best, time.process_time() - began)
    return block.numel() * 4 / best


def memory(work: Work, which: str, temperature: float) -> float:
    """Peak memory in MB of one pass of one of the two beyond what the process had before it.

    Resident memory (its peak is set back first, which Linux allows); on CUDA allocated memory.
    """
    (ours if which == "ours" else generate)(work._replace(rows=work.rows[:2]), temperature)  # first use loads
    if work.policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (ours if which == "ours" else generate)(work, temperature)
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    (ours if which == "ours" else generate)(work, temperature)
    return round((resident("VmHWM") - before) / 1024, 1)


def resident(name: str) -> int:
    """A figure of /proc/self/status in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name + ":")))


def memory_of(name: str, which: str, arguments: argparse.Namespace) -> float:
    """`memory` of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.rollouts", "--model", name, "--memory-of", which]
    command += ["--temperature", str(arguments.temperature), "--device", arguments.device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


if __name__ == "__main__":
    main()
