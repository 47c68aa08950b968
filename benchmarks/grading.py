"""Throughput of `grade` beside math-verify, alternating in one run; prints calls a CPU second and the ratio.

    python benchmarks/grading.py [--files FOLDER] [--rounds 5]

CPU seconds of this process and of the grader's worker processes are counted, so that work moved into a worker is not
free. FOLDER holds the public benchmark files (math500/test.jsonl); without it a list of our own answers stands in.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

from math_verify import parse, verify

from data.grading import grade, symbolic

_OWN_GOLDS = (
    r"\frac{3}{7}", "42", r"2\sqrt{3}", r"\frac{\pi}{4}", "x^2+3x-4", "(3,-2)", r"[2,\infty)", "-17", "0.375",
    r"90^\circ",
    r"\frac{\sqrt{5}}{5}", "1,2,6", r"\text{Friday}", r"12\pi", "2500", r"3 \pm \sqrt{2}", r"(-\infty,1)\cup(2,\infty)",
    "101_2", r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", "7+4i", "y = 3x - 5", r"\$15.50", r"6\text{ cm}^2", "1320",
)  # fmt: skip


def word_problems(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """(completion, gold) in the manner of GSM8K: three lines of arithmetic and a marked answer, one in four wrong."""
    draw = random.Random(seed)
    rows = []
    for _ in range(n):
        a, b, c = draw.randint(2, 90), draw.randint(2, 60), draw.randint(2, 40)
        total = (a + b) * c
        text = (
            f"There are {a} + {b} = <<{a}+{b}={a + b}>>{a + b} boxes in the two rooms.\n"
            f"Each box holds {c} pens, so there are {a + b} * {c} = <<{a + b}*{c}={total}>>{total} pens.\n"
            f"#### {total:,}"
        )
        rows.append((text, str(total if draw.random() < 0.75 else total + 1)))
    return rows


def latex_answers(folder: Path | None) -> list[tuple[str, str]]:
    """(completion, gold): each gold boxed as it is, and once more with its fractions and spaces written differently."""
    file = folder / "math500" / "test.jsonl" if folder else None
    if file and file.is_file():
        golds = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    else:
        golds = list(_OWN_GOLDS)
    rows = []
    for gold in golds:
        rows.append((f"Therefore the answer is $\\boxed{{{gold}}}$.", gold))
        other = gold.replace("\\frac{", "\\dfrac{").replace("+", " + ").replace(",", ", ")
        rows.append((f"Therefore the answer is $\\boxed{{ {other} }}$.", gold))
    return rows


def _worker_seconds() -> float:
    """CPU seconds that the grader's live worker processes have used."""
    ticks = 0
    for pid in symbolic.worker_pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _ours(rows: list[tuple[str, str]], kind: str) -> tuple[float, int]:
    symbolic.equal.cache_clear()
    before = time.process_time() + _worker_seconds()
    right = sum(grade(text, gold, kind).correct for text, gold in rows)
    return time.process_time() + _worker_seconds() - before, right


def _math_verify(rows: list[tuple[str, str]]) -> tuple[float, int]:
    before = time.process_time()
    right = sum(bool(verify(parse(f"${gold}$"), parse(text))) for text, gold in rows)
    return time.process_time() - before, right


def compare(name: str, rows: list[tuple[str, str]], kind: str, rounds: int, bar: float) -> float:
    """Alternates the two graders over the rows and prints the median rates; gives their ratio."""
    ours, theirs = [], []
    for _ in range(rounds):
        seconds, right = _ours(rows, kind)
        ours.append(len(rows) / seconds)
        seconds, other_right = _math_verify(rows)
        theirs.append(len(rows) / seconds)
    rate, other = statistics.median(ours), statistics.median(theirs)
    print(f"{name}: {len(rows)} answers, median of {rounds} alternating rounds, calls a CPU second")
    print(f"  grade {rate:,.0f} ({right} right)   math-verify {other:,.0f} ({other_right} right)")
    print(f"  ratio {rate / other:.1f} (bar {bar:g}: {'met' if rate / other >= bar else 'MISSED'})")
    return rate / other


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, default=os.environ.get("RATCHET_BENCHMARK_FILES"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    symbolic.warm()
    compare("GSM8K-like", word_problems(300), "number", arguments.rounds, bar=50)
    folder = Path(arguments.files) if arguments.files else None
    compare("MATH answers", latex_answers(folder), "math", arguments.rounds, bar=1)


if __name__ == "__main__":
    main()
