"""Arrows point one way: flows → tasks → models → data."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["data", "models", "tasks", "flows"]
HEAVY = {"torch", "prefect", "transformers", "peft", "accelerate"}
ALLOWED = {"data": set(), "models": HEAVY - {"prefect"}, "tasks": {"prefect"}, "flows": {"prefect"}}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_against_the_arrows(room):
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / room).rglob("*.py")
        for name in imports(path)
        if name in above or (name in HEAVY and name not in ALLOWED[room])
    }
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_every_package_has_an_init_so_that_no_installed_module_shadows_it(room):
    for folder in {path.parent for path in (ROOT / room).rglob("*.py")}:
        assert (folder / "__init__.py").exists(), folder


def test_importing_all_of_data_loads_neither_torch_nor_prefect():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "data").rglob("*.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["flows.settings", "models.requests", "flows.cli", "flows.preflight", "flows.plan", "flows.serve"]
)
def test_settings_and_command_line_import_no_torch_no_prefect(module):
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
