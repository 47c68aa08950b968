"""Which difficulty of a suite starves the outcome signal of a base: its success by stage, before any study is run."""

import json
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, stable_hash
from data.progress import Report
from data.segmentation import split_steps
from data.suites import SUITES
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout.engines import make_engine
from models.stage_success import STAGES, stage_success
from models.study import outside
from models.study_requests import CalibrationRequest

SEED = 271828
"""Of the examples, which belong to no split of any run."""


def calibrate(request: CalibrationRequest, out: Path, report: Report) -> dict[str, Any]:
    """Samples the base from the question and from the last start state at each difficulty; says which fits the rule.

    Writes `calibration.json` and returns suite → the difficulty that lies least outside of the rule's bands.
    """
    policy = Policy.load(PolicyFiles(base=request.base), compute=request.compute)
    engine = make_engine(request.engine, policy)
    excluded = {row["question"] for path in request.excluded for row in read_rows(path, "questions")}
    found: dict[str, dict[str, Any]] = {}
    for number, (name, prompt) in enumerate(request.suites.items()):
        suite = SUITES[name]
        found[name] = {}
        for difficulty in request.difficulties:
            examples = suite.examples(request.demonstrations, SEED, difficulty, excluding=excluded)
            rows = [
                {
                    "item_id": stable_hash(example.question)[:32],
                    "question": example.question,
                    "response": example.response,
                    "steps": split_steps(example.rationale, suite.segmentation),
                    "answer": example.answer,
                    "answer_kind": example.answer_kind,
                }
                for example in examples
            ]
            success = stage_success(
                policy,
                engine,
                rows,
                {0: request.rule.samples, STAGES - 1: 1},
                prompt=prompt,
                suite=name,
                temperature=request.rl.temperature,
                max_new_tokens=request.rl.max_new_tokens,
                seed=SEED,
            )
            shares = {f"stage_{stage}": [share.right, share.valid] for stage, share in success.items()}
            found[name][str(difficulty)] = shares | {"outside": outside(success, request.rule)}
            valid = ", ".join(f"stage {stage} {100 * share.counted:.1f} %" for stage, share in success.items())
            report.log(f"{name} {difficulty}, valid chains: {valid}")
        report.progress(number + 1, len(request.suites), "suites")
    (out / "calibration.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return {name: min(levels, key=lambda level: levels[level]["outside"]) for name, levels in found.items()}
