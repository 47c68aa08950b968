"""`ratchet compare` on a study of seconds: stopped, continued by two workers at once, checked, found out."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.flows.studies import SMALL

TOP = Path(__file__).resolve().parents[2]


def toml(value) -> str:
    """A nested table as one TOML document of inline tables; None, which TOML lacks, is left out."""

    def inline(item):
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {inline(v)}" for key, v in item.items() if v is not None) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(inline, item)) + "]"
        return json.dumps(item)

    return "".join(f"{key} = {inline(item)}\n" for key, item in value.items())


def command(folder: Path, *arguments: str) -> subprocess.Popen:
    line = [sys.executable, "-m", "flows", "compare", "small.toml", "--root", "runs", "--out", "results", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TOP), "PREFECT_HOME": str(folder / "prefect")}
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ratchet(folder: Path, *arguments: str, code: int = 0) -> str:
    process = command(folder, *arguments)
    text = process.communicate(timeout=400)[0]
    assert process.returncode == code, text
    return text


def test_a_study_is_run_in_parts_checked_and_found_out(tmp_path):
    (tmp_path / "small.toml").write_text(toml(SMALL | {"seeds": [1]}))
    text = ratchet(tmp_path, "--cells", "sums/own/1", "sums/base/1", "--max-cells", "1")
    assert "1 cells are finished, 13 are missing" in text
    listed = ratchet(tmp_path, "--list")
    assert "sums/own/1  finished" in listed and listed.count("missing") == 13
    ratchet(tmp_path)
    results = json.loads((tmp_path / "results" / "small.json").read_text())
    assert results["missing"] == [] and results["cells"] == 14 and results["seeds"] == [1]
    assert results["mean"]["own"]["accuracy"]["mean"] == 100.0
    difference = results["differences"]["adaptive_minus_rl"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    record = json.loads((tmp_path / "results" / "small" / "rules--adaptive_70--1.json").read_text())
    whole = json.loads((tmp_path / "results" / "small" / "rules--adaptive--1.json").read_text())
    assert record["generated_tokens"] < whole["generated_tokens"] and record["tuned"] == whole["tuned"] != {}
    assert record["warmup_sha256"] == whole["warmup_sha256"]
    assert "came out the same, answer by answer" in ratchet(tmp_path, "--check")
    results["differences"]["adaptive_minus_rl"]["mean"] += 1
    (tmp_path / "results" / "small.json").write_text(json.dumps(results))
    assert "differences do not follow from the per-answer tables" in ratchet(tmp_path, "--check", code=2)
