"""Random rollouts of a tiny policy, for tests of the update and of the rounds."""

from pathlib import Path

from data.artifacts import write_table
from models.policy import Policy, TokenRow
from models.requests import Device, PolicyFiles, UpdateRequest
from models.settings import LoraTraining, RLSettings
from tests.tiny import save_base

CPU = Device(device="cpu", threads=1)
LORA = LoraTraining(rank=2, alpha=4)


def make_base(folder: Path) -> PolicyFiles:
    """A base folder with a random Llama, without weights on top."""
    return PolicyFiles(base=save_base(folder))


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
