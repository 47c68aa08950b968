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
