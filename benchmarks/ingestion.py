"""Ingestion beside `datasets`: rows a CPU second on one core, and bytes retained a row.

    python benchmarks/ingestion.py [--rows 60000] [--repeats 3] [--file FILE]

Ours twice: parsing and splitting alone (read, recognise, cut into steps), and the whole step (that, checks, grading
every demonstration, duplicates, splits, and writing Parquet). Theirs: `load_dataset("json")` and one `map` that splits
lines, with an empty cache each time; it validates nothing. The measurements alternate, so that a busy machine slows
both alike. Retained memory is the growth of the peak between 4 n and 8 n rows, each in a process of its own (Linux).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from data.ingestion import ingest
from data.ingestion.sources import demonstration_stream
from data.progress import Silent
from data.segmentation import split_steps
from data.settings import FileSource, Splits


def write_rows(path: Path, n: int) -> None:
    """`n` distinct demonstrations of GSM8K's layout and about its length, as JSON lines."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(n):
            pens, price = number % 97 + 3, number % 41 + 2
            cost = pens * price
            file.write(
                json.dumps(
                    {
                        "question": f"In shop {number}, Ada buys {pens} pens for ${price} each, and then she pays "
                        f"${number} for a notebook with a blue cover. How many dollars does Ada spend altogether?",
                        "answer": f"The pens cost {pens}*{price}=$<<{pens}*{price}={cost}>>{cost}.\n"
                        f"Together with the notebook that is {cost}+{number}=$<<{cost}+{number}={cost + number}>>"
                        f"{cost + number}.\nSo Ada spends {cost + number} dollars in the shop.\n#### {cost + number}",
                    }
                )
                + "\n"
            )


def parse_and_split(path: Path) -> int:
    """Rows read, recognised and cut into steps."""
    stream = demonstration_stream(FileSource(path=str(path)), None, 0)
    count = 0
    for row in stream.rows:
        found = stream.parse(row.values)
        split_steps(found.rationale, stream.unit(found))
        count += 1
    return count


def whole_step(path: Path) -> int:
    """Rows through the whole step."""
    with tempfile.TemporaryDirectory() as out:
        counts = ingest(
            FileSource(path=str(path)),
            "benchmark",
            Path(out),
            splits=Splits(),
            segmentation=None,
            answer_kind=None,
            test=None,
            report=Silent(),
        )
    return counts["read"]


def with_datasets(path: Path) -> int:
    """Rows loaded by `datasets` and mapped once."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
        return table.map(lambda row: {"steps": row["answer"].split("\n")}).num_rows


def rate(measured: Callable[[Path], int], path: Path) -> float:
    """Rows a CPU second (user and system)."""
    start = time.process_time()
    rows = measured(path)
    return rows / (time.process_time() - start)


def peak_bytes(path: Path) -> int:
    """Peak resident memory of a process that takes the file through the whole step."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def own_peak_bytes() -> int:
    """Peak resident memory of this process. `getrusage` would count what its parent had before it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Prints the rates and the retained bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, help="measure this file instead of generated rows")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        whole_step(options.peak)
        print(own_peak_bytes())
        return
    ways = {"parsing and splitting": parse_and_split, "whole step": whole_step, "datasets load + map": with_datasets}
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "rows.jsonl"
        if not options.file:
            write_rows(path, options.rows)
        for measured in ways.values():
            measured(path)  # imports, caches
        rates = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, measured in ways.items():
                rates[name].append(rate(measured, path))
        print(f"{path.stat().st_size / 1e6:.1f} MB, {options.repeats} alternating repeats, rows a CPU second:")
        for name, found in rates.items():
            print(f"  {name:<24}{statistics.median(found):>10,.0f}   ({min(found):,.0f} to {max(found):,.0f})")
        small, large = Path(folder) / "small.jsonl", Path(folder) / "large.jsonl"
        write_rows(small, 4 * options.rows)
        write_rows(large, 8 * options.rows)
        grown = peak_bytes(large) - peak_bytes(small)
        each = grown / (4 * options.rows)
        print(
            f"  retained bytes a row: {each:.0f} (peak of {8 * options.rows:,} rows less that of {4 * options.rows:,})"
        )


if __name__ == "__main__":
    main()
