"""One Prefect server for all end-to-end tests, started from a fresh clone by README's commands as they are typed."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flows.config import parse_overrides
from tests.end_to_end.mini import ARGUMENTS, NAME, OVERRIDES, environment

ROOT = Path(__file__).resolve().parents[2]
CLONED = ("flows", "tasks", "models", "data", "prefect.yaml", "pyproject.toml", "README.md")


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def readme_commands(heading: str) -> list[str]:
    """The commands of the first console block below a heading of README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index(f"\n## {heading}\n") :]
    return re.search(r"```console\n(.*?)```", section, re.DOTALL).group(1).strip().splitlines()


class Server:
    """A Prefect server with its own database: the folder it was started from, how commands reach it."""

    def __init__(self, folder: Path, home: Path):
        self.folder, self.home = folder, home
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.environment = environment(home) | {
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_UI_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": str(folder),
            "DO_NOT_TRACK": "1",
            "RATCHET_CACHE": str(home / "cache"),
            **self.object_store(),
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def object_store(self) -> dict[str, str]:
        """How an S3 API on loopback is reached; the tests that are marked s3 start it."""
        self.s3_port = free_port()
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "planted-secret-4711",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    bin = str(Path(sys.executable).parent)

    def typed(self, command: str, cwd: Path | None = None, timeout: float = 200) -> str:
        """Runs a command of README as it is typed in the clone (or elsewhere) and returns what it printed."""
        command = command.replace(":4200/", f":{self.port}/")
        command = re.sub(r"(?<![\w/])\.venv/bin/", f"{self.bin}/", command)
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value
            return ""
        if command.endswith("&"):
            self.start(command.rstrip("& "), cwd)
            return ""
        done = subprocess.run(
            shlex.split(command),
            env=self.environment,
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def start(self, command: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen:
        """Starts a command in the background, with further environment `variables`; `logs` holds what it prints."""
        name = f"{len(self.processes)}-{command.split('/')[-1][:30].replace(' ', '-')}"
        log = open(self.home / f"{name}.log", "w")
        self.processes[name] = subprocess.Popen(
            shlex.split(command),
            env=self.environment | variables,
            cwd=cwd or self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self.processes[name]

    def prefect(self, arguments: str, **named) -> str:
        """Runs `prefect ARGUMENTS`."""
        return self.typed(f".venv/bin/prefect {arguments}", **named)

    def ratchet(self, arguments: str, **named) -> str:
        """Runs `ratchet ARGUMENTS`."""
        return self.typed(f".venv/bin/ratchet {arguments}", **named)

    def printed(self, process: subprocess.Popen) -> str:
        """What a started process has printed."""
        name = next(name for name, started in self.processes.items() if started is process)
        return (self.home / f"{name}.log").read_text()

    def run(self, deployment: str, parameters: dict, cwd: Path | None = None, timeout: float = 400) -> str:
        """`prefect deployment run` with `parameters`, watched to its end; fails unless it completes."""
        return self.typed(self.deployment_run(deployment, parameters), cwd=cwd, timeout=timeout)

    def deployment_run(self, deployment: str, parameters: dict) -> str:
        """The command of `run`."""
        given = " ".join(f"--param {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in parameters.items())
        return f"{self.bin}/prefect deployment run {deployment} --watch --watch-interval 1 {given}"

    def post(self, path: str, body: dict):
        """The answer of the server's API."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.api}/{path}", data, kind, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def send(self, path: str, body: list | dict) -> None:
        """Posts to the server's API where it answers nothing."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self.api}/{path}", data, kind, method="POST"), timeout=30)

    def artifacts(self) -> dict[str, dict]:
        """The latest artifact of each key."""
        return {item["key"]: item for item in self.post("artifacts/latest/filter", {"limit": 200})}

    def kill(self, process: subprocess.Popen) -> None:
        """Kills a started process and its group."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended
        process.wait()

    def close(self) -> None:
        """Ends everything that was started."""
        for process in self.processes.values():
            self.kill(process)

    def logs(self) -> str:
        """What the background processes have printed."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.home.glob("*.log")))


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """What a fresh clone holds, without the environment."""
    folder = tmp_path_factory.mktemp("clone")
    for name in CLONED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


@pytest.fixture(scope="session")
def server(clone, tmp_path_factory):
    """README's commands up to the deployment run: server, setup, deploy, one worker."""
    server = Server(clone, tmp_path_factory.mktemp("prefect-server"))
    try:
        for command in readme_commands("A Prefect server")[:-1]:
            server.typed(command)
        yield server
    except BaseException:
        print(server.logs())
        raise
    finally:
        server.close()
        time.sleep(0.2)


@pytest.fixture(scope="session")
def deployed(server, tmp_path_factory):
    """The run of README's last command, made small, typed in another folder: its root and what was printed."""
    root = tmp_path_factory.mktemp("root")
    overrides = json.dumps(parse_overrides(ARGUMENTS))
    small = f" --param root={root} --param {shlex.quote(f'overrides={overrides}')}"
    printed = server.typed(readme_commands("A Prefect server")[-1] + small, cwd=root, timeout=500)
    return root, printed


@pytest.fixture(scope="session")
def one_process(server, tmp_path_factory):
    """Two experts, trained in one process on a local disk: what every disturbed run is compared with."""
    root = tmp_path_factory.mktemp("one-process")
    server.run("reasoning-pipeline/tiny", {"name": NAME, "root": str(root), "overrides": OVERRIDES})
    return root / NAME
