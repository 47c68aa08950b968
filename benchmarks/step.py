"""CPU seconds of a whole RL step: ours, from rollouts to the adapter on disk, and TRL's GRPOTrainer, in alternation.

    python benchmarks/step.py [--steps 6] [--prompts 8] [--group 8] [--completion 64]

Both train the same random Llama (1.1 M parameters, float32, one thread) from the same prompts of 32 tokens, with their
own rollouts at temperature 1 and the same reward. Ours are the step functions of the pipeline: models.rounds:generate
(rollouts, grading, rollouts.parquet) and models.update:update (weights and optimiser state read and written). TRL's is
GRPOTrainer's training step with transformers' `generate`, which writes nothing. The model draws its own ends, so the
numbers of sampled tokens differ a little: what is compared is CPU seconds per sampled token.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import TrainerCallback

from benchmarks.update_step import LINEAR, PROMPT_TOKENS, RATE, llama
from data.artifacts import write_table
from data.progress import Silent
from data.settings import NoCurriculum, PlainPrompt, RewardSettings
from models.policy import Policy
from models.requests import Device, PolicyFiles, RolloutsRequest, UpdateRequest
from models.rounds import generate
from models.settings import FullTraining, GroupMeanStd, LoraTraining, RLSettings, TransformersEngine
from models.update import update
from tests.tiny import save_base

BARS = {"full": 0.6, "lora": 0.5}
"""CPU seconds per sampled token, ours to TRL's, that this project asks of itself."""
CPU = Device(device="cpu", threads=1)


def early_ids(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward of both: the share of sampled ids in the first half of the vocabulary."""
    return [sum(token < 256 for token in ids) / len(ids) for ids in completion_ids]


def word_tokenizer(vocabulary: int = 512) -> Any:
    """One token for each of the words w0, w1, ... with spaces between them; EOS w2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")


class OurStep:
    """Rounds of ours, each continuing from the one before."""

    def __init__(self, kind: str, folder: Path, questions: Sequence[str], group: int, longest: int) -> None:
        self.folder = folder
        self.parameters = FullTraining() if kind == "full" else LoraTraining(rank=8, alpha=16, target_modules=LINEAR)
        self.base = save_base(folder / "base", llama(128), word_tokenizer())
        Policy.load(PolicyFiles(base=self.base), self.parameters, CPU, True).save(folder / "warmup")
        self.weights, self.trainer_state, self.curriculum = folder / "warmup", None, None
        self.rl = RLSettings(
            prompts=len(questions), samples=group, max_new_tokens=longest, learning_rate=RATE, advantage=GroupMeanStd()
        )
        self.starts = folder / "start_states.parquet"
        write_table(self.starts, "start_states", [start_state(n, question) for n, question in enumerate(questions)])
        self.round = self.tokens = 0

    def step(self) -> int:
        """One round; returns its number of sampled tokens."""
        place = self.folder / str(self.round)
        for part in ("rollouts", "update"):
            (place / part).mkdir(parents=True)
        files = PolicyFiles(base=self.base, weights=self.weights)
        shared = {"rl": self.rl, "round": self.round, "seed": 0, "compute": CPU}
        made = generate(
            RolloutsRequest(
                policy=files,
                reference=files,
                prompt=PlainPrompt(template="{question}"),
                curriculum=NoCurriculum(),
                curriculum_state=self.curriculum,
                reward=RewardSettings(functions=("benchmarks.step:early_ids",)),
                engine=TransformersEngine(),
                start_states=self.starts,
                generated_tokens_so_far=self.tokens,
                **shared,
            ),
            place / "rollouts",
            Silent(),
        )
        self.tokens += made["generated_tokens"]
        request = UpdateRequest(
            policy=files,
            parameters=self.parameters,
            rollouts=place / "rollouts" / "rollouts.parquet",
            trainer_state=self.trainer_state,
            generated_tokens_so_far=self.tokens,
            **shared,
        )
        update(request, place / "update", Silent())
        self.weights, self.trainer_state = place / "update" / "weights", place / "update" / "trainer_state"
        self.curriculum = place / "rollouts" / "curriculum.json"
        self.round += 1
        return made["generated_tokens"]


def start_state(number: int, question: str) -> dict[str, Any]:
    """A start state at the question."""
    return {
        "item_id": f"item{number}",
        "start_state_id": f"item{number}/0",
        "task": "words",
        "stage": 0,
        "n_stages": 1,
        "revealed_steps": 0,
        "total_steps": 1,
        "question": question,
        "prefix": "",
        "remainder": "w7",
        "answer": "7",
        "answer_kind": "number",
    }


class Clock(TrainerCallback):
    """CPU seconds of each of TRL's steps, and of one of ours after each."""

    def __init__(self, ours: OurStep) -> None:
        self.ours = ours
        self.began = 0.0
        self.seconds: dict[str, list[float]] = {"ours": [], "trl": []}
        self.tokens: dict[str, list[int]] = {"ours": [], "trl": []}

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """TRL begins with its rollouts."""
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """TRL's optimiser has stepped; now one step of ours."""
        self.seconds["trl"].append(time.process_time() - self.began)
        began = time.process_time()
        self.tokens["ours"].append(self.ours.step())
        self.seconds["ours"].append(time.process_time() - began)


def compare(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians of both over the steps after the first, and the ratio per sampled token."""
    generator = random.Random(1)
    questions = [
        " ".join(f"w{generator.randrange(4, 512)}" for _ in range(PROMPT_TOKENS)) for _ in range(options.prompts)
    ]
    clock = Clock(OurStep(kind, folder, questions, options.group, options.completion))
    trainer = trl_trainer(kind, options, folder, questions, clock)
    trainer.train()
    result: dict[str, Any] = {}
    for name in ("ours", "trl"):
        seconds, tokens = clock.seconds[name][1:], clock.tokens[name][1:]
        result[name] = {
            "cpu_seconds_a_step": round(statistics.median(seconds), 3),
            "sampled_tokens_a_step": statistics.mean(tokens),
            "cpu_ms_per_token": 1000 * statistics.median(s / t for s, t in zip(seconds, tokens)),
        }
    ratio = result["ours"]["cpu_ms_per_token"] / result["trl"]["cpu_ms_per_token"]
    return result | {"ratio": round(ratio, 3), "bar": BARS[kind]}


def trl_trainer(kind: str, options: argparse.Namespace, folder: Path, questions: Sequence[str], clock: Clock) -> Any:
    """TRL's GRPOTrainer on the same model, prompts, reward and settings."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        clock.tokens["trl"].append(sum(map(len, completion_ids)))
        return early_ids(prompts, completion_ids)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
            per_device_train_batch_size=options.prompts * options.group,
            num_generations=options.group,
            gradient_accumulation_steps=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=options.steps + 1,
            max_completion_length=options.completion,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
        )
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEAR), task_type="CAUSAL_LM")
        trainer = GRPOTrainer(
            model=llama(128),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": list(questions)}),
            processing_class=word_tokenizer(),
            callbacks=[clock],
            peft_config=lora if kind == "lora" else None,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 6), ("prompts", 8), ("group", 8), ("completion", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=["full", "lora"], action="append")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for kind in options.kind or ["full", "lora"]:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = compare(kind, options, Path(folder))
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
