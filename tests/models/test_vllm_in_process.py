"""vLLM inside the computing process, on its own environment: the path of engine.kind vllm, whole rounds included."""

import subprocess

import pytest

from data.artifacts import read_rows
from data.progress import Silent
from data.settings import PlainPrompt
from models.policy import Policy
from models.requests import EvaluateRequest, PolicyFiles
from models.rollout.vllm_python import ROOT
from models.settings import EvaluationSettings, FullTraining, VLLMEngine
from tasks.compute import Compute
from tests.models.test_vllm_real import cell_request, check_cell, files  # noqa: F401
from tests.rl import CPU
from tests.vllm_servers import PYTHON, needs_vllm

pytestmark = pytest.mark.vllm

ALSO_RUN = ("test_rollout.py", "test_policy.py", "test_losses.py")
"""Tests of the models room that run on vLLM's libraries (another transformers) as well."""


@pytest.fixture(scope="module")
def compute():
    needs_vllm()
    process = Compute(threads=1, python=str(PYTHON))
    yield process
    process.close()


def test_whole_rounds_with_adapters_then_with_full_weights(files, tmp_path, compute):  # noqa: F811
    """One resident engine: adapters of successive rounds, then full weights of successive rounds, then the base."""
    (tmp_path / "full").mkdir()
    request = cell_request(files, tmp_path, VLLMEngine())
    assert compute.call("models.cell:run_rounds", request, None, Silent(), 400)["finished"]
    check_cell(tmp_path)

    full = tmp_path / "full"
    base = Policy.load(PolicyFiles(base=files["base"]), FullTraining(), CPU, trainable=True)
    base.save(full / "warmup")
    request = cell_request(files, full, VLLMEngine(), FullTraining(), full / "warmup")
    assert compute.call("models.cell:run_rounds", request, None, Silent(), 400)["finished"]
    check_cell(full)

    (tmp_path / "answers").mkdir()
    evaluated = EvaluateRequest(
        policy=PolicyFiles(base=files["base"]),
        model="base",
        prompt=PlainPrompt(),
        evaluation=EvaluationSettings(max_new_tokens=4),
        engine=VLLMEngine(),
        questions=request.questions,
        split="validation",
        compute=CPU,
    )
    compute.call("models.evaluation:evaluate", evaluated, tmp_path / "answers", Silent(), 400)
    assert len(read_rows(tmp_path / "answers" / "evaluations.parquet", "evaluations")) == 4


def test_the_models_room_on_vllms_libraries():
    needs_vllm()
    tests = [str(ROOT / "tests" / "models" / name) for name in ALSO_RUN]
    done = subprocess.run(
        [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
