"""TRL's own trainers on rollouts that are given to them, for the tests of equality and the benchmark of speed."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from models.scoring import TokenRow
from tests.tiny import character_tokenizer


def fixed_rollouts(rows: Sequence[TokenRow], samples: int) -> tuple[Any, Callable]:
    """A data set whose prompts name the groups of `rows`, and the function through which TRL gets those completions."""
    from datasets import Dataset

    by_group = [rows[start : start + samples] for start in range(0, len(rows), samples)]

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, list]:
        taken = {prompt: iter(by_group[int(prompt)]) for prompt in set(prompts)}
        chosen = [next(taken[prompt]) for prompt in prompts]
        return {
            "prompt_ids": [list(row.prompt_ids) for row in chosen],
            "completion_ids": [list(row.completion_ids) for row in chosen],
            "logprobs": [[0.0] * len(row.completion_ids) for row in chosen],
        }

    return Dataset.from_dict({"prompt": [str(group) for group in range(len(by_group))]}), rollouts


def grpo_trainer(
    folder: Path,
    model: Any,
    rows: Sequence[TokenRow],
    rewards: Sequence[float],
    samples: int,
    optimizer: torch.optim.Optimizer | None = None,
    callbacks: Sequence[Any] = (),
    peft_config: Any = None,
    **changes: Any,
) -> Any:
    """A GRPOTrainer in float32 on the CPU whose rollouts are `rows` (groups of `samples`) with these rewards."""
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    dataset, rollouts = fixed_rollouts(rows, samples)
    reward_of = {(*row.prompt_ids, -1, *row.completion_ids): reward for row, reward in zip(rows, rewards, strict=True)}
    prompt_of = {str(number): rows[number * samples].prompt_ids for number in range(len(rows) // samples)}

    def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [reward_of[(*prompt_of[prompt], -1, *ids)] for prompt, ids in zip(prompts, completion_ids)]

    settings = {
        "per_device_train_batch_size": len(rows),
        "num_generations": samples,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "max_steps": 1,
        "beta": 0.0,
    } | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
            **settings,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=dataset,
            processing_class=character_tokenizer(),
            rollout_func=rollouts,
            optimizers=(optimizer, None),
            callbacks=list(callbacks),
            peft_config=peft_config,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def rloo_trainer(folder: Path, model: Any, samples: int, rows: int) -> Any:
    """An RLOOTrainer in float32 on the CPU, whose loss is asked for batches that are given to it."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = RLOOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            per_device_train_batch_size=rows,
            num_generations=samples,
            beta=0.0,
        )
        return RLOOTrainer(
            model=model,
            reward_funcs=lambda prompts, **columns: [0.0] * len(prompts),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["0"] * (rows // samples)}),
            processing_class=character_tokenizer(),
        )
