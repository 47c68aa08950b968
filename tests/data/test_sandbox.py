"""Programs: what is found in a text, what runs, and that nothing breaks out."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from data import sandbox
from data.grading import grade
from data.grading.grader import equal_result
from data.grading.quantities import parse_quantity
from data.program_source import find_program
from data.sandbox import ProgramLimits, run_program

LIMITS = ProgramLimits(seconds=1.0)
SLACK = 1.5
"""Seconds beyond the limit in which a run must be over (killing and noticing; the machine may be loaded)."""


@pytest.fixture(scope="module", autouse=True)
def warm_workers():
    sandbox.warm()


def body(*lines: str) -> str:
    return "def solution():\n" + "".join(f"    {line}\n" for line in lines)


FOUND = {
    "plain": "def solution():\n    return 7",
    "fenced": "Here:\n```python\ndef solution():\n    return 7\n```\nIt returns 7.",
    "unclosed fence": "```python\ndef solution():\n    return 7",
    "prose after": "def solution():\n    return 7\n\nThe answer is 5.",
    "blank line inside": "def solution():\n    a = 3\n\n    b = 4\n\n    return a + b",
    "docstring with a blank line": 'def solution():\n    """One.\n\n    Question: two?"""\n    return 7',
    "imports and helper": "import math\ndef f(x):\n    return math.floor(x)\ndef solution():\n    return f(7.9)",
    "constant": "X = 7\ndef solution():\n    return X",
    "called and printed": "def solution():\n    return 7\nprint(solution())",
    "last of two": "def solution():\n    return 5\ndef solution():\n    return 7",
    "last fenced": "```\ndef solution():\n    return 5\n```\nFixed:\n```\ndef solution():\n    return 7\n```",
    "run-on": "def solution():\n    return 7\n\nQuestion: next?\ndef solution():\n    return 5",
    "whole float": "def solution():\n    return 7.0",
    "tabs": "def solution():\n\treturn 7",
    "after thinking": "<think>def solution(): return 5</think>\ndef solution():\n    return 7",
}


@pytest.mark.parametrize("text", FOUND.values(), ids=FOUND.keys())
def test_program_is_found_and_gives_seven(text: str) -> None:
    assert grade(text, "7", "program").correct


REFUSED = {
    "no program": "The answer is 7.",
    "no return": body("x = 7"),
    "truncated": "def solution():\n    x = (3 +",
    "truth value": body("return True"),
    "string": body("return '7'"),
    "list": body("return [7]"),
    "none": body("return None"),
    "nan": body("return float('nan')"),
    "infinite": body("return float('inf')"),
    "complex": body("return 7 + 0j"),
    "argument wanted": "def solution(x):\n    return 7",
    "asynchronous": "async def solution():\n    return 7",
    "inside a class": "class A:\n    def solution(self):\n        return 7",
    "unfinished thinking": "<think>\ndef solution():\n    return 7",
    "error": body("return 7 / 0"),
    "wrong": body("return 8"),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_program_is_refused(text: str) -> None:
    assert not grade(text, "7", "program").correct


HOSTILE = {
    "import os": body("import os", "os.system('touch /tmp/broke-out')", "return 7"),
    "import subprocess": body("import subprocess", "return 7"),
    "import socket": body("import socket", "return 7"),
    "import ctypes": body("import ctypes", "return 7"),
    "dynamic import": body("__import__('os').system('id')", "return 7"),
    "importlib": body("import importlib", "return 7"),
    "dunder walk": body("return len(().__class__.__base__.__subclasses__())"),
    "globals walk": body("return (lambda: 0).__globals__['x']"),
    "builtins": body("return __builtins__.open('/etc/passwd')"),
    "read a file": body("open('/etc/passwd').read()", "return 7"),
    "write a file": body("open('/tmp/broke-out', 'w').write('x')", "return 7"),
    "pathlib": body("from pathlib import Path", "Path('/etc/passwd').read_text()", "return 7"),
    "environment": body("import os", "return len(os.environ)"),
    "fork": body("import os", "while True:", "    os.fork()"),
    "endless loop": body("while True:", "    pass"),
    "endless sum": body("return sum(x for x in range(10**12))"),
    "swallowed time-out": body(
        "while True:", "    try:", "        while True: pass", "    except BaseException:", "        pass"
    ),
    "swallowed in finally": body("try:", "    while True: pass", "finally:", "    while True: pass"),
    "sleep": body("import time", "while True:", "    time.sleep(100)"),
    "memory of strings": body("x = 'a'", "while True:", "    x = x + x"),
    "memory of lists": body("x = []", "while True:", "    x.append([0] * 1000)"),
    "memory at once": body("return len([0] * 10**10)"),
    "print flood": body("while True:", "    print('x' * 1000)"),
    "print long": body("print('x' * 10**7)", "return 7"),
    "huge power": body("return 10 ** 10 ** 9"),
    "power tower": body("return 9 ** 9 ** 9 ** 9"),
    "huge factorial": body("import math", "return math.factorial(10 ** 7)"),
    "many digits": body("return 7 ** 5000"),
    "text of many digits": body("return int('9' * 10 ** 6)"),
    "format width": body("return len(f'{7:1000000000}')"),
    "recursion": body("def f(n): return f(n + 1)", "return f(0)"),
    "mutual recursion": body("f = lambda n: g(n)", "g = lambda n: f(n)", "return f(0)"),
    "backtracking": body("import re", "return len(re.match('(a+)+$', 'a' * 40 + 'b').group())"),
    "exit": body("import sys", "sys.exit(0)"),
    "system exit": body("raise SystemExit(7)"),
    "input": body("return int(input())"),
    "nested source": body("return " + "(" * 3000 + "7" + ")" * 3000),
    "long source": body(*["x = 1"] * 5000, "return 7"),
    "nul": "def solution():\n    return 7\x00",
    "surrogate": "def solution():\n    return '\ud800'",
    "deep lists": body("x = []", "for i in range(10**5): x = [x]", "return x"),
    "cycle": body("x = []", "x.append(x)", "return x"),
    "own number": "class N(int):\n    pass\n" + body("return N"),
    "decorator": "@print\n" + body("return 7"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_break_out_is_a_graded_failure_within_the_limit(text: str) -> None:
    began = time.monotonic()
    result = run_program(text, LIMITS)
    assert time.monotonic() - began < LIMITS.seconds + SLACK
    assert not result.ok, result
    assert not Path("/tmp/broke-out").exists()
    assert run_program(body("return 7"), LIMITS).text == "7"  # the pool is healthy


def test_host_killed_from_outside_is_a_graded_failure_and_replaced() -> None:
    for pid in sandbox.worker_pids():
        os.kill(pid, 9)
    results = [run_program(body("return 7"), LIMITS) for _ in range(6)]
    assert {result.reason for result in results} <= {"ok", "worker_died"}
    assert results[-1].ok


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (("import time", "return int(time.time())"), "946684800"),
        (("import datetime", "return datetime.date.today().year"), "2000"),
        (("import time", "start = time.perf_counter()", "return time.perf_counter() - start"), "0"),
    ],
)
def test_the_same_program_gives_the_same_result_on_any_day(lines: tuple[str, ...], value: str) -> None:
    assert grade(body(*lines), value, "program").parsed == value
    dice = body("import random", "return random.randint(1, 10**9)")
    assert grade(dice, "1", "program").parsed == grade(dice, "1", "program").parsed is not None


def test_threads_share_the_pool() -> None:
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run_program(body(f"return {n}")).text)) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=int) == [str(n) for n in range(12)]


def test_worker_sees_no_environment_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_SECRET", "s3cret")
    sandbox.close()
    assert run_program(body("return 7")).ok
    environment = Path(f"/proc/{sandbox.worker_pids()[0]}/environ")
    if environment.exists():
        assert b"s3cret" not in environment.read_bytes()


def test_interpreter_ends_at_once_with_live_workers_and_torch_like_threads(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading, time
            from data.sandbox import run_program, worker_pids
            threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()
            assert run_program("def solution():\\n    return 7").text == "7"
            print(*worker_pids())
            """
        )
    )
    root = Path(__file__).resolve().parents[2]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 30
    time.sleep(0.3)
    for pid in done.stdout.split():
        assert (
            not Path(f"/proc/{pid}/cmdline").exists()
            or b"program_worker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        )


def test_find_program_takes_no_prose() -> None:
    assert find_program("from there we go\ndef solution():\n    return 1\nDone!") == "def solution():\n    return 1"
    assert find_program("def solution") is None


@pytest.mark.parametrize(
    ("value", "gold", "right"),
    [
        ("18", "18", True),
        ("18.000000001", "18", True),
        ("18.001", "18", False),
        ("17", "18", False),
        ("8.99955", "9.0", True),
        ("3.3333333333333335", "3.333", True),
        ("3.3333333333333335", "3.33", True),
        ("3.3333333333333335", "3.3", False),
        ("0.335", "0.333", False),
        ("0.34", "0.333", False),
        ("100001", "100000", False),
        ("0.30000000000000004", "0.3", True),
    ],
)
def test_results_and_rounded_golds(value: str, gold: str, right: bool) -> None:
    quantities = [parse_quantity(text).value for text in (value, gold)]
    assert equal_result(*quantities, gold) is right


@pytest.mark.benchmark_files
def test_published_programs_give_their_golds(benchmark_files: Path) -> None:
    wrong = {}
    for name in ("gsm8k/train_programs.json", "svamp/train_programs.json"):
        for row in json.loads((benchmark_files / name).read_text(encoding="utf-8")):
            result = grade(row["answer_cot"], row["answer_value"], "program")
            if not result.correct:
                wrong[row["item_id"]] = result.reason
    assert len(wrong) == 1
    assert all("No module named 'sympy'" in reason for reason in wrong.values())
