"""A small model's folder, an adapter and a benchmark file for the tests of evaluations, made in the test."""

import json

import torch

from tests.tiny import save_base


def model_folder(folder):
    """A random tiny Llama as an ordinary Hugging Face folder."""
    return save_base(folder) / "model"


def adapter_folder(folder, base):
    """A PEFT adapter on `base` that changes it, saved by peft itself."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def gsm8k_file(path, questions=10):
    """A file in GSM8K's layout with questions of our own."""
    rows = [
        {"question": f"Ann has {n} pens and buys {n + 2}. How many?", "answer": f"{n} + {n + 2}\n#### {2 * n + 2}"}
        for n in range(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def theoremqa_file(path):
    """A file in TheoremQA's layout: two questions, and one that needs a picture."""
    rows = [
        {"Question": "What is 1 + 1?", "Answer": 2, "Answer_type": "integer", "Picture": None, "id": "a/1"},
        {"Question": "Is 2 even?", "Answer": True, "Answer_type": "bool", "Picture": None, "id": "a/2"},
        {"Question": "See it.", "Answer": 3, "Answer_type": "integer", "Picture": "a.png", "id": "b/9"},
    ]
    rows = [row | {"field": field} for row, field in zip(rows, "XYX")]
    path.write_text(json.dumps(rows))
    return path
