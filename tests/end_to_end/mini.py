"""A whole run in well under a minute: the tiny preset with everything made small, and how its folder is compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

from flows.config import parse_overrides

ARGUMENTS = """
--model.hidden_size 32 --model.layers 2 --model.intermediate_size 64 --model.pretrain_steps 120
--model.pretrain_batch 16
--reward.partial 0.3 --experts.arithmetic.source.difficulty 2 --experts.programs.source.difficulty 2
--experts.state.source.difficulty 2
--splits.validation 8 --splits.test 12 --warmup.max_steps 4 --warmup.batch_size 8
--experts.arithmetic.source.demonstrations 24 --experts.programs.source.demonstrations 24
--experts.state.source.demonstrations 24
--rl.generated_tokens 1500 --rl.prompts 4 --rl.samples 4 --rl.max_new_tokens 32 --rl.rounds_per_task 2
--rl.validate_every 2 --evaluation.max_new_tokens 32 --composition.importance_examples 8 --composition.gate_steps 2
--composition.batch_size 4 --composition.router.kind sequence --composition.router.steps 4
--composition.router.start_steps 4 --composition.router.batch_size 4 --compute.threads 1
""".split()

OVERRIDES = parse_overrides(ARGUMENTS) | {"arms": {"plain_rl": None}}
OVERRIDES["experts"] = OVERRIDES["experts"] | {"programs": None}
NAME = "two-experts"
"""A still smaller run for what is run many times: two experts, one arm."""


def environment(home: Path) -> dict[str, str]:
    """The environment of a command whose Prefect database lies in `home`."""
    names = {"PREFECT_HOME": str(home), "PREFECT_API_URL": "", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {name: value for name, value in (kept | names).items() if value}


def ratchet(*arguments: str, home: Path) -> subprocess.Popen:
    """The `ratchet` command, started."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows", *arguments],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hashes(run: Path) -> dict[str, str]:
    """Place in the run's folder → content hash of every published file; of a text, its content without the run's path.

    An adapter and its card name their base by path.
    """
    found = {}
    for manifest in sorted(run.rglob("manifest.json")):
        for name, entry in json.loads(manifest.read_text())["files"].items():
            path = manifest.parent / name
            text = path.suffix in (".json", ".md")
            found[str(path.relative_to(run))] = path.read_text().replace(str(run), "") if text else entry["sha256"]
    return found
