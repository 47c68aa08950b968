"""Time of the gated pool against a plain PEFT adapter of the same stored rank: forward pass and cached decode.

    python -m benchmarks.loracoe [--hidden 768] [--layers 6] [--adapters 6] [--rank 8] [--device cpu]

X-LoRA is PEFT's, router and all: it runs the model twice and keeps no cache, so its decode is compared at fewer tokens.

The variants run in alternation, so that what else the machine does meets all of them; the ratio of medians is printed.
Weights are random: time does not depend on them.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from models.loracoe.adapters import read_adapter
from models.loracoe.gated import GatedModel
from models.loracoe.pool import Pool, build_pool
from models.loracoe.routers import SequenceRouter, TokenRouter
from models.loracoe.xlora import xlora_model
from models.shared_modules import shared_copy

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Measures and prints one line a variant, then the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("hidden", 768), ("layers", 6), ("adapters", 6), ("rank", 8), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with torch.no_grad():
        models = build(arguments)
        ids = torch.randint(0, 1000, (arguments.batch, arguments.length), device=arguments.device)
        options = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        attended = torch.ones_like(ids)
        ratios = {
            "forward": compare(models, lambda model: model(input_ids=ids, use_cache=False), arguments.repeats),
            "decode": compare(
                models,
                lambda model: model.generate(input_ids=ids, attention_mask=attended, **options),
                max(3, arguments.repeats // 3),
            ),
        }
    print(json.dumps({"settings": vars(arguments), "ratio_to_plain_adapter": ratios}, indent=1))


def build(arguments: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """One base under a plain adapter of rank T·r, and under a pool of T adapters of rank r with each kind of gates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
    )
    base = LlamaForCausalLM(config).eval().requires_grad_(False).to(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        pool = random_pool(base, Path(folder), arguments.adapters, arguments.rank)
        experts = {str(index): Path(folder) / str(index) for index in range(arguments.adapters)}
        x_lora = xlora_model(base, experts, seed=0)
        whole = write_random_adapter(base, Path(folder) / "whole", arguments.adapters * arguments.rank)
        plain = PeftModel.from_pretrained(shared_copy(base), whole).eval()
    one = GatedModel(shared_copy(base), pool)
    one.set_gates(pool.one_hot_gates("0"))
    dense = GatedModel(shared_copy(base), pool)
    dense.set_gates(pool.constant_gates(0.5))
    sequence = GatedModel(shared_copy(base), pool)
    states_BH = torch.randn(arguments.batch, arguments.hidden, device=arguments.device)
    sequence.set_dynamic(SequenceRouter(arguments.hidden, pool).to(arguments.device)(states_BH))
    token = GatedModel(shared_copy(base), pool)
    TokenRouter(pool, active=arguments.rank).to(arguments.device).install(token)
    return {
        "plain adapter": plain,
        "base": base,
        "one-hot gates": one.model,
        "dense task gates": dense.model,
        "sequence gates": sequence.model,
        "token gates": token.model,
        "X-LoRA": x_lora,
    }


def write_random_adapter(base: torch.nn.Module, folder: Path, rank: int) -> Path:
    """A random PEFT adapter on all linear layers of `base`."""
    config = LoraConfig(r=rank, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(shared_copy(base), config).save_pretrained(folder)
    return folder


def random_pool(base: torch.nn.Module, folder: Path, adapters: int, rank: int) -> Pool:
    """A pool of random adapters, named 0, 1, ..."""
    names = [str(index) for index in range(adapters)]
    return build_pool([read_adapter(write_random_adapter(base, folder / name, rank), name) for name in names])


def compare(models: dict[str, torch.nn.Module], run, repeats: int) -> dict[str, float]:
    """Times `run` on every model in alternation, after one run each to warm up; ratios of medians to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            start = now()
            run(model)
            if repeat:
                seconds[name].append(now() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain = next(iter(medians.values()))
    for name, median in medians.items():
        print(f"{name:20} {1000 * median:8.1f} ms  {median / plain:5.2f} x", flush=True)
    return {name: round(median / plain, 3) for name, median in medians.items()}


def now() -> float:
    """Seconds, after the device has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
