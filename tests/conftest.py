"""Fixtures that every room uses."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def benchmark_files() -> Path:
    """The folder of public benchmark files: RATCHET_BENCHMARK_FILES, or `shared/data` beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RATCHET_BENCHMARK_FILES", beside))
    if not folder.is_dir():
        pytest.skip("the public benchmark files are not here: set RATCHET_BENCHMARK_FILES to their folder")
    return folder


NEVER_SKIPPED = ("prefect", "vllm", "s3", "chromium", "benchmark_files")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With RATCHET_NO_SKIPS set (as in CI) a skipped test of a real part is a failure."""
    report = (yield).get_result()
    if report.skipped and os.environ.get("RATCHET_NO_SKIPS"):
        marks = [mark for mark in NEVER_SKIPPED if item.get_closest_marker(mark)]
        if marks:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} is marked {', '.join(marks)} and was skipped: {call.excinfo.value}"
