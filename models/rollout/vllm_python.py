"""Finds a Python that has vLLM: this one, one that is named, or the one that `make vllm` or `make vllm-cpu` made.

vLLM and Prefect cannot share an environment (vllm 0.33 wants fastapi below 0.137, prefect 3.9 at least 0.139), so vLLM
has one of its own. Imports neither torch nor vLLM.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MADE = (".venv-vllm", ".venv-vllm-cpu")
"""Environments that the Makefile makes beside the packages, in the order in which they are looked for."""

PACKAGES = ("vllm", "vllm-cpu")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for max_lora_rank."""

VLLM_LARGEST_RANK = VLLM_RANKS[-1]
LIBRARIES = ("torch", "transformers", "peft", "math-verify", "pydantic-monty")
ASK_SECONDS = 120.0
REMEDY = "run `make vllm-cpu` (CPU) or `make vllm` (GPU), or name a Python with vLLM"

_QUESTION = f"""
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {{}}
for name in {PACKAGES + LIBRARIES!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class VLLMPython:
    """An interpreter with vLLM."""

    path: str
    package: str
    """`vllm` or `vllm-cpu`."""
    versions: dict[str, str]
    """Of the package and of the libraries that change numbers."""

    @property
    def on_cpu(self) -> bool:
        """Whether this vLLM computes on the CPU only."""
        return self.package == "vllm-cpu"

    def server_command(self, model: str) -> list[str]:
        """How the server is started: the command of vllm-cpu fails, since it looks for a package named vllm."""
        if self.on_cpu:
            return [self.path, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [self.path, "-m", "vllm.entrypoints.cli.main", "serve", model]


def has_vllm() -> bool:
    """Whether this process's own Python has vLLM."""
    for name in PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def find(python: str | None, field: str, root: Path = ROOT) -> VLLMPython:
    """The Python to run vLLM on: `python` where it is given, else this one, else one that the Makefile made.

    Raises UserError, naming `field` as the place to give one, where there is none.
    """
    if python is not None:
        found = _ask(str(Path(python).expanduser()))
        if found is None:
            raise UserError(f"{field}: {python} is no Python with vLLM; {REMEDY}")
        return found
    candidates = [sys.executable] if has_vllm() else []
    candidates += [str(root / name / "bin" / "python") for name in MADE]
    for candidate in candidates:
        if (found := _ask(candidate)) is not None:
            return found
    raise UserError(f"vLLM is not installed here; {REMEDY} with {field}")


_found: dict[str, VLLMPython] = {}
"""Pythons that were asked and have vLLM: asking takes a tenth of a second, and every step's key needs the answer."""


def _ask(python: str) -> VLLMPython | None:
    if python in _found:
        return _found[python]
    if not os.access(python, os.X_OK) and "/" in python:
        return None
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    versions = json.loads(answer)
    for package in PACKAGES:
        if package in versions:
            _found[python] = VLLMPython(python, package, versions)
            return _found[python]
    return None


def offered_rank(rank: int) -> int:
    """The smallest max_lora_rank of vLLM that takes adapters of `rank`. Raises UserError above the largest."""
    for offered in VLLM_RANKS:
        if offered >= rank:
            return offered
    raise UserError(
        f"vLLM takes adapters up to rank {VLLM_LARGEST_RANK}, not {rank}; lower parameters.rank, compose "
        "fewer adapters at once, or sample with the engine transformers"
    )
