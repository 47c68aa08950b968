"""Whatever the text, a grade comes by its deadline: from the main thread, a thread, asyncio and a forked process."""

import asyncio
import os
import random
import threading
import time

import pytest

from data import sandbox
from data.grading import grade, symbolic
from data.workers import WorkerPool, WorkerTimeout

DEADLINE = symbolic.GRADE_SECONDS + 1.0
GOLDS = ("5", r"\frac{5^{5}-5}{16}", "x^2+1", "(2,3)", r"\sqrt{2}+\sqrt{3}", "1,2,3", r"\{1,2\}", r"\sin x")
PIECES = (
    "1", "9", "x", "\\frac{", "}", "{", "^{", "(", ")", "+", "-", "*", "/", "!", "\\sqrt{", ",", "\\pi", "\\sin ",
    "e", "\\pm ",
    "\\le ", "=", "\\cup ", "[", "]", "10^", "|", "\\text{", "cm ", " ", "\\{", "\\}", "\\binom{",
)  # fmt: skip

LONG = [
    "\\boxed{" * 20_000, "\\boxed{1}" * 15_000, "#### 1\n" * 20_000, "answer is " * 20_000, "The answer is 5. " *
    10_000,
    "#### " + "9" * 100_000, "\\boxed{" + "9" * 100_000 + "}", "<answer>" * 20_000, "<answer>1</answer>" * 8_000,
    "<think>" * 20_000, "</think>" * 20_000, "$" * 100_000, "{" * 100_000, "}" * 100_000, "(" * 50_000 + ")" * 50_000,
    "\\" * 100_000, "\x00" * 100_000, "\ud800" * 1000, " " * 200_000, "\n" * 200_000, "answer" + " " * 100_000 + "is",
    "a" * 200_000, "1." * 100_000, ". " * 100_000, "Q: " * 60_000, "### " * 50_000, "#" * 200_000, "-" * 100_000,
    "\\text{" * 30_000, "#### " + "1,000" * 20_000, "1 " * 100_000,
]  # fmt: skip
BOXED = [
    "(" * 900 + "1" + ")" * 900, "\\sqrt{" * 300 + "2" + "}" * 300, "\\frac{1}{1+" * 150 + "x" + "}" * 150, "\\frac"
    * 400,
    "\\sqrt" * 390 + "2", "\\sin" * 400 + " x", "^".join("9" * 40), "9^{" * 40 + "9" + "}" * 40, "1+" * 900 + "1",
    "(x+1)" * 60, "(x+1)^{199}", "x^{" + "9" * 30 + "}", "2000!" + "\\cdot 2001!" * 100, "\\binom{3000}{1500}^{3}",
    "10^{10^{10}}",
    "1e999999999", "5 " + "a" * 1900 + "!", "\\cup" * 300, "x=" * 400, "x<" * 400, "\\{" + "\\pm 1," * 300 + "1\\}",
    "1\\pm " * 30 + "1", "\\sqrt{2}" + "+\\sqrt{3}" * 60, "\\sqrt{" * 15 + "2+\\sqrt{3}" + "}" * 15, "\\sin(10^{200})",
    "e^{e^{e^{e^{e}}}}", "\\log_{2}(3^{100000})", "x^{x^{x^{x}}}", "\\begin{pmatrix}" + "1&" * 500 + "1\\end{pmatrix}",
    "1:" * 500 + "1", "0.\\overline{" + "1" * 390 + "}", "\ud800", "\x00", ",".join(map(str, range(400))),
    "7^{7^{7^{7}}}",
]  # fmt: skip


def strings(n: int) -> list[str]:
    """Hand-made and random adversarial texts."""
    draw = random.Random(0)
    made = LONG + [f"\\boxed{{{text}}}" for text in BOXED]
    while len(made) < n:
        made.append("\\boxed{" + "".join(draw.choice(PIECES) for _ in range(draw.choice((30, 200, 900)))) + "}")
    return made


TEXTS = strings(1000)


def sweep(texts: list[str]) -> float:
    """Grades every text and gives the longest time."""
    worst = 0.0
    for place, text in enumerate(texts):
        began = time.monotonic()
        grade(text, GOLDS[place % len(GOLDS)], "math")
        grade(text, "7", "number")
        worst = max(worst, time.monotonic() - began)
    return worst


@pytest.fixture(scope="module", autouse=True)
def warm_workers():
    symbolic.warm()
    sandbox.warm()


def test_main_thread() -> None:
    assert sweep(TEXTS) < DEADLINE


def test_every_kind_on_the_long_texts() -> None:
    for kind, gold in (("choice", "B"), ("label", "yes"), ("string", "abc"), ("program", "5")):
        for text in LONG:
            began = time.monotonic()
            assert not grade(text, gold, kind).correct
            assert time.monotonic() - began < DEADLINE


def test_thread() -> None:
    worst: list[float] = []
    threads = [threading.Thread(target=lambda: worst.append(sweep(TEXTS[::4]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 2 and max(worst) < DEADLINE


def test_asyncio() -> None:
    async def run() -> float:
        return sweep(TEXTS[::3])

    assert asyncio.run(run()) < DEADLINE


def test_forked_process_starts_its_own_workers() -> None:
    symbolic.equal.cache_clear()
    symbolic.begin()
    parents = set(symbolic.worker_pids())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            right = grade(r"\boxed{\frac{1}{\sqrt{3}}}", r"\frac{\sqrt3}{3}", "math").correct
            program = grade("def solution():\n    return 7", "7", "program").correct
            fine = right and program and sweep(TEXTS[::3]) < DEADLINE and not parents & set(symbolic.worker_pids())
            status = 0 if fine else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert grade(
        r"\boxed{\frac{2}{\sqrt{3}}}", r"\frac{2\sqrt3}{3}", "math"
    ).correct  # the parent's workers are untouched


def test_killed_symbolic_workers_are_replaced() -> None:
    for pid in symbolic.worker_pids():
        os.kill(pid, 9)
    verdicts = []
    for n in range(2, 10):
        verdicts.append(grade(rf"\boxed{{\frac{{{n}}}{{\sqrt{{7}}}}}}", rf"\frac{{{n}\sqrt7}}{{7}}", "math"))
    assert {verdict.reason for verdict in verdicts} <= {"correct", "worker_died"}
    assert verdicts[-1].correct


def test_worker_that_hangs_is_killed_at_the_limit() -> None:
    pool = WorkerPool("tests.data.hanging_worker", size=1, calls_per_worker=3)
    try:
        assert pool.call({"n": 1}, 5.0) == {"n": 1}
        first = pool.pids()
        began = time.monotonic()
        with pytest.raises(WorkerTimeout):
            pool.call({"hang": True}, 0.5)
        assert time.monotonic() - began < 1.5
        assert pool.call({"n": 2}, 5.0) == {"n": 2}
        second = pool.pids()
        assert first != second
        pool.call({"n": 3}, 5.0)
        pool.call({"n": 4}, 5.0)
        assert pool.pids() != second  # recycled after three calls
    finally:
        pool.close()
    assert pool.pids() == []


def test_too_much_work_is_a_timeout_and_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "GRADE_SECONDS", 0.0)
    result = grade(r"\boxed{\frac{11}{\sqrt{13}}}", r"\frac{11\sqrt{13}}{13}", "math")
    assert not result.correct and result.reason == "timeout"
    monkeypatch.undo()
    assert grade(r"\boxed{\frac{11}{\sqrt{13}}}", r"\frac{11\sqrt{13}}{13}", "math").correct  # it was not remembered
