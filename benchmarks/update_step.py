"""CPU seconds of one policy update: ours and TRL's GRPOTrainer in alternation on the same rollouts and weights.

    python benchmarks/update_step.py [--steps 8] [--group 8] [--hidden 128] [--completion 64]

Both train the same random Llama (hidden 128, 4 layers, vocabulary 512, 1.1 M parameters, float32, one thread) on the
same 8 × 8 rollouts (prompt 32, completions up to 64), every parameter and LoRA of rank 8. What is timed is the training
part: for TRL from the end of the reward function to the end of the optimiser's step, for us the updater's step. Both
print their first loss, which must agree. The limit is the arithmetic of the products with weights over the speed of a
matrix product of those shapes, measured in the same run.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from models.advantages import make_estimator
from models.policy import Policy
from models.requests import Device, PolicyFiles
from models.scoring import TokenRow
from models.settings import FullTraining, GroupMeanStd, LoraTraining, RLSettings
from models.training_rows import TrainRow
from models.updater import Updater
from tests.tiny import save_base
from tests.trl_peer import grpo_trainer

PROMPTS, PROMPT_TOKENS = 8, 32
RATE = 1e-6
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama(hidden: int, layers: int = 4) -> LlamaForCausalLM:
    """The random model: four heads, an intermediate layer four times as wide, tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def rollouts(group: int, longest: int) -> tuple[list[TokenRow], list[float]]:
    """Random tokens and rewards. Most completions are as long as allowed, as those of an untrained model are."""
    generator = random.Random(1)
    rows, rewards = [], []
    for _ in range(PROMPTS):
        prompt = [1, *(generator.randrange(4, 512) for _ in range(PROMPT_TOKENS - 1))]
        for _ in range(group):
            length = longest if generator.random() < 0.85 else generator.randint(longest // 4, longest)
            rows.append(TokenRow(prompt, [generator.randrange(4, 512) for _ in range(length)]))
            rewards.append(generator.random())
    return rows, rewards


class Clock(TrainerCallback):
    """Takes TRL's time from the end of the reward function to the end of the step, then ours of the same step."""

    def __init__(self, ours: Any) -> None:
        self.ours = ours
        self.started = 0.0
        self.trl: list[float] = []
        self.own: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """One step of TRL is done; now one of ours."""
        self.trl.append(time.process_time() - self.started)
        began = time.process_time()
        self.losses.append(self.ours())
        self.own.append(time.process_time() - began)


def compare(kind: str, hidden: int, group: int, longest: int, steps: int, folder: Path) -> dict[str, float]:
    """Median CPU seconds a step of both, for every parameter ("full") or LoRA of rank 8 ("lora"), and first losses."""
    rows, rewards = rollouts(group, longest)
    model = llama(hidden)
    base = PolicyFiles(base=save_base(folder / kind, model))
    lora = LoraTraining(rank=8, alpha=16, target_modules=LINEAR)
    policy = Policy.load(base, FullTraining() if kind == "full" else lora, Device(device="cpu", threads=1), True)
    advantages = make_estimator(GroupMeanStd())(rewards, [i // group for i in range(len(rows))])
    rl = RLSettings(prompts=PROMPTS, samples=group, max_new_tokens=longest, learning_rate=RATE, engine_ratio_cap=None)
    found = [
        TrainRow(row, i // group, rewards[i], advantages[i], torch.zeros(len(row.completion_ids)), None)
        for i, row in enumerate(rows)
    ]
    updater = Updater(policy, rl, found)

    def ours() -> float:
        updater.old_logprobs.clear()
        updater.moved = False
        return updater.step(range(len(found)))["loss"]

    clock = Clock(ours)
    peft_config = None
    if kind == "lora":
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    trainer = grpo_trainer(
        folder / "trl",
        model,
        rows,
        rewards,
        group,
        callbacks=[clock],
        peft_config=peft_config,
        loss_type="dapo",
        max_completion_length=longest,
        learning_rate=RATE,
        max_grad_norm=1.0,
        max_steps=steps + 1,
        logging_steps=1,
    )
    rewarded = trainer.reward_funcs[0]

    def reward(*arguments: Any, **columns: Any) -> list[float]:
        values = rewarded(*arguments, **columns)
        clock.started = time.process_time()
        return values

    trainer.reward_funcs[0] = reward
    losses = []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: losses.append(loss := compute_loss(*a, **k)) or loss
    trainer.train()
    return {
        "trl": statistics.median(clock.trl[1:]),
        "ours": statistics.median(clock.own[1:]),
        "trl_loss": losses[0].item(),
        "our_loss": clock.losses[0],
    }


def matrix_rate(hidden: int, tokens: int) -> float:
    """GFLOP a second of products [tokens, hidden] × [hidden, 4 hidden], the shape of most of the work."""
    left, right = torch.randn(tokens, hidden), torch.randn(hidden, 4 * hidden)
    for _ in range(3):
        left @ right
    rounds = 20
    began = time.process_time()
    for _ in range(rounds):
        left @ right
    return rounds * 2 * tokens * hidden * 4 * hidden / (time.process_time() - began) / 1e9


def arithmetic(hidden: int, group: int, longest: int) -> tuple[float, float]:
    """GFLOP of a step with every parameter trained: prompts once a row, and once a group."""
    rows, _ = rollouts(group, longest)
    weights = 4 * 16 * hidden * hidden + 512 * hidden
    completions = sum(len(row.completion_ids) for row in rows)
    whole = completions + len(rows) * PROMPT_TOKENS
    return 6 * weights * whole / 1e9, 6 * weights * (completions + PROMPTS * PROMPT_TOKENS) / 1e9


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--completion", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole, shared = arithmetic(options.hidden, options.group, options.completion)
    for kind in ("full", "lora"):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(kind, options.hidden, options.group, options.completion, options.steps, Path(folder))
        print(
            f"{kind}: ours {found['ours']:.3f} CPU s a step, TRL {found['trl']:.3f}: "
            f"{found['ours'] / found['trl']:.3f} of TRL's; first loss ours {found['our_loss']:.9f}, "
            f"TRL {found['trl_loss']:.9f}"
        )
        if abs(found["our_loss"] - found["trl_loss"]) > 1e-5 * abs(found["trl_loss"]) + 1e-8:
            sys.exit("the first losses differ: not the same computation")
    rate = matrix_rate(options.hidden, 4096)
    print(
        f"limit, every parameter: {whole:.1f} GFLOP with repeated prompts, {shared:.1f} with shared ones, at "
        f"{rate:.1f} GFLOP/s: {whole / rate:.2f} and {shared / rate:.2f} CPU s"
    )


if __name__ == "__main__":
    main()
