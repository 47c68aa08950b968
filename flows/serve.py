"""`ratchet serve`: a vLLM server for a run's model, with the flags that its rollouts need; imports no torch."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from data import storage
from data.errors import UserError
from flows import reaper
from flows.settings import RunSettings
from models.fetch import SMOL, smol_folder, smol_problem
from models.rollout import vllm_python
from models.rollout.vllm_python import VLLM_LARGEST_RANK, VLLMPython, offered_rank

POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0
ORPHAN_SECONDS = 2.0
KEY_VARIABLE = "VLLM_API_KEY"


def model_place(settings: RunSettings) -> str:
    """Folder or hub name of the run's base. Raises UserError where it is not made or fetched yet."""
    model = settings.model
    if model.kind == "tiny":
        url = storage.join(settings.root, settings.name, "base")
        found, reason = storage.find(url)
        if found is None:
            raise UserError(
                f"the base model of run {settings.name!r} is not there to be served ({url}: {reason}); "
                "`ratchet run` builds it with --engine.kind transformers, or name a pretrained model"
            )
        return str((storage.fetch(found) / "model").resolve())
    if model.name == SMOL:
        if problem := smol_problem():
            raise UserError(f"model.name: {problem}")
        return str(smol_folder())
    local = Path(model.name).expanduser()
    return str(local.resolve()) if local.is_dir() else model.name


def rank_of(settings: RunSettings) -> int | None:
    """The max_lora_rank that the run's adapters need, composed ones included; None: no adapter is trained."""
    if settings.parameters.kind != "lora":
        return None
    composed = len(settings.experts) if settings.composition.enabled else 1
    rank = settings.parameters.rank
    return offered_rank(max(rank, min(rank * composed, VLLM_LARGEST_RANK)))


def command(settings: RunSettings, python: VLLMPython, host: str, port: int, extra: str = "") -> list[str]:
    """The server's command line; `extra` are further flags of vLLM's own, which win."""
    model, rank = settings.model, rank_of(settings)
    flags: dict[str, Any] = {
        "--host": host,
        "--port": port,
        "--dtype": getattr(model, "dtype", "float32"),
        "--max-model-len": model.context,
        "--revision": getattr(model, "revision", None),
        "--generation-config": "vllm",  # the model's own defaults (top-p, penalties) are not ours
        "--logprobs-mode": "processed_logprobs",  # of what is sampled from: after the temperature
        "--max-lora-rank": rank,
        "--max-loras": None if rank is None else 2,  # the new adapter is loaded before the old one goes
    }
    line = python.server_command(model_place(settings))
    for flag, value in flags.items():
        line += [] if value is None else [flag, str(value)]
    line += ["--enable-prefix-caching", *([] if rank is None else ["--enable-lora"])]
    line += ["--enforce-eager"] if python.on_cpu else []
    return line + shlex.split(extra)


def environment(settings: RunSettings, python: VLLMPython) -> dict[str, str]:
    """The server's environment: what is set already stays."""
    values = {"VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if rank_of(settings) is None:
        values["VLLM_SERVER_DEV_MODE"] = "1"  # the calls that take new full weights
    else:
        values["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if python.on_cpu:
        values["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    if settings.compute.threads is not None:
        values["OMP_NUM_THREADS"] = str(settings.compute.threads)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return values | inherited


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(settings: RunSettings, *, host: str, port: int, python: str | None, wait: float, extra: str) -> int:
    """Starts the server, prints its URL when it answers, and ends it with its whole process group on Ctrl-C or SIGTERM.

    `wait`: seconds until it must answer. `port` 0 takes a free one. Returns the exit code. Raises UserError for a taken
    port, a missing vLLM, and full weights served to other machines.
    """
    chosen = vllm_python.find(python, "--python")
    if not is_loopback(host):
        if rank_of(settings) is None:
            raise UserError(
                "--host: parameters.kind full needs vLLM's development calls, which let whoever reaches them run code; "
                "serve on 127.0.0.1 and use a tunnel"
            )
        if not os.environ.get(KEY_VARIABLE):
            print(f"ratchet: whoever reaches {host} may use this server; {KEY_VARIABLE} sets a key", file=sys.stderr)
    port = _free_port(host, port)
    line = command(settings, chosen, host, port, extra)
    reaper.watch()
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, _interrupt)
    print(
        f"starting {chosen.package} {chosen.versions[chosen.package]}: {shlex.join(line)}", file=sys.stderr, flush=True
    )
    process = subprocess.Popen(
        line,
        env=environment(settings, chosen) | {reaper.MARK: os.environ[reaper.MARK]},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        cwd="/",  # a folder named vllm in the current one would be imported in place of the package
    )
    try:
        _wait_until_ready(process, host, port, wait)
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}", flush=True)
        return 1 if process.wait() else 0
    except KeyboardInterrupt:
        return 0
    finally:
        _end(process)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"--port {port} on {host} cannot be used ({error.strerror}); choose another") from None
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen, host: str, port: int, wait: float) -> None:
    """Raises UserError where the server ends or does not answer in time."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reached}]:{port}/health" if ":" in reached else f"http://{reached}:{port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + wait
    while True:
        if process.poll() is not None:
            raise UserError(f"vLLM ended with code {process.returncode} before it answered; its reason stands above")
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass  # not listening yet
        if time.monotonic() > deadline:
            raise UserError(f"vLLM did not answer within {wait:g} s; give it longer with --wait SECONDS")
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen) -> None:
    """Ends the server's process group: asked first, killed after `GRACE_SECONDS`.

    Where the server itself is gone nothing waits for an answer any more, and its workers are killed soon.
    """
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break  # nothing of the group is left
        asked = time.monotonic()
        while _group_lives(process):
            patience = grace if process.poll() is None else min(grace, ORPHAN_SECONDS)
            if time.monotonic() > asked + patience:
                break
            time.sleep(0.05)
    process.wait()


def _group_lives(process: subprocess.Popen) -> bool:
    process.poll()  # a dead leader that nobody waited for would count as alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
