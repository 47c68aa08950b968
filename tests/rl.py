"""Random rollouts of a tiny policy, for tests of the update and of the rounds."""

from pathlib import Path

import torch

from data.artifacts import write_table
from models.policy import Policy
from models.requests import Device, PolicyFiles, UpdateRequest
from models.scoring import TokenRow
from models.settings import LoraTraining, RLSettings
from tests.tiny import save_base

CPU = Device(device="cpu", threads=1)
LORA = LoraTraining(rank=2, alpha=4)


def make_base(folder: Path) -> PolicyFiles:
    """A base folder with a random Llama, without weights on top."""
    return PolicyFiles(base=save_base(folder))


def make_adapter(folder: Path) -> PolicyFiles:
    """A base with an adapter that is not the identity."""
    base = make_base(folder / "base")
    policy = Policy.load(base, LORA, CPU, trainable=True, seed=1)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    policy.save(folder / "weights")
    return PolicyFiles(base=base.base, weights=folder / "weights")


def rollout_rows(files: PolicyFiles, rewards: list[list[float | None]], temperature: float = 1.0, seed: int = 0):
    """Rows of the table rollouts: one group per list of `rewards`, random tokens, advantages by group mean.

    Sampling (and reference) log-probabilities are those of the policy in `files`.
    """
    import random

    from models.advantages import GroupMeanEstimator

    generator = random.Random(seed)
    rows = []
    for group, rewards_G in enumerate(rewards):
        prompt = [1, *(generator.randrange(4, 100) for _ in range(3 + group))]
        advantages = GroupMeanEstimator()(rewards_G, [0] * len(rewards_G))
        for sample, (reward, advantage) in enumerate(zip(rewards_G, advantages)):
            completion = [generator.randrange(4, 100) for _ in range(2 + (5 * sample + group) % 7)]
            rows.append(
                {
                    "item_id": f"item{group}",
                    "start_state_id": f"start{group}",
                    "stage": 0,
                    "group": group,
                    "sample": sample,
                    "prompt_ids": prompt,
                    "prefix_length": 0,
                    "completion_ids": [*completion, 2],
                    "stop_reason": "eos",
                    "correct": reward == 1,
                    "reward": reward,
                    "advantage": advantage,
                    "policy_version": 0,
                    "seed": sample,
                }
            )
    policy = Policy.load(files, compute=CPU)
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows]
    for row, logprobs in zip(rows, policy.completion_logprobs(tokens, temperature)):
        row["sampling_logprobs"] = row["reference_logprobs"] = logprobs.detach().tolist()
    return rows


def update_request(folder: Path, files: PolicyFiles, rows: list[dict], **changes) -> UpdateRequest:
    """Writes `rows` to `folder`/rollouts.parquet and returns the request to train on them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "rollouts.parquet", "rollouts", rows)
    rl = {"prompts": 4, "samples": 4, "max_new_tokens": 16, "learning_rate": 1e-3, **changes}
    return UpdateRequest(
        policy=files,
        parameters=LORA,
        rollouts=folder / "rollouts.parquet",
        trainer_state=None,
        rl=RLSettings.model_validate(rl),
        round=0,
        generated_tokens_so_far=0,
        seed=0,
        compute=CPU,
    )


def early_letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """A reward that a random policy earns in part: the share of characters before "m"."""
    return [sum(character < "m" for character in text) / max(len(text), 1) for text in completions]


def low_ids(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float]:
    """The share of sampled ids below 40: about 0.3 for a random policy, and learnt in a few rounds."""
    return [sum(id < 40 for id in ids) / len(ids) for ids in completion_ids]


def early_letters_of_stage_0(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """`early_letters` from the question alone; 1 after a revealed prefix."""
    shares = early_letters(prompts, completions)
    return [1.0 if prefix else share for share, prefix in zip(shares, columns["prefix"])]


def write_start_states(path: Path, items: int = 6, n_stages: int = 3) -> Path:
    """start_states.parquet with `items` sums of three steps each, in `n_stages` stages."""
    rows = []
    for item in range(items):
        steps = [f"{item}+1={item + 1}\n", f"{item + 1}+2={item + 3}\n", f"The answer is {item + 3}."]
        for stage in range(n_stages):
            revealed = min(len(steps) - 1, stage)
            rows.append(
                {
                    "item_id": f"item{item}",
                    "start_state_id": f"item{item}/{stage}",
                    "task": "sums",
                    "stage": stage,
                    "n_stages": n_stages,
                    "revealed_steps": revealed,
                    "total_steps": len(steps),
                    "question": f"{item}+1+2?",
                    "prefix": "".join(steps[:revealed]),
                    "remainder": "".join(steps[revealed:]),
                    "answer": str(item + 3),
                    "answer_kind": "number",
                }
            )
    write_table(path, "start_states", rows)
    return path


def write_questions(path: Path, count: int = 4) -> Path:
    """questions.parquet with `count` validation questions."""
    rows = [
        {
            "task": "sums",
            "benchmark": "held-out",
            "item_id": f"question{item}",
            "question": f"{item}+4?",
            "gold": str(item + 4),
            "answer_kind": "number",
            "subject": None,
            "split": "validation",
        }
        for item in range(count)
    ]
    write_table(path, "questions", rows)
    return path
