"""What orchestration costs: milliseconds of Prefect a task run, and its share of a round.

    python benchmarks/orchestration.py [--tasks 100] [--round-seconds 74]

Runs a flow of steps that are found complete (key, manifest, hashes, log lines, one progress artifact each) on the
Prefect API that is set, the embedded one otherwise, and the same work without Prefect; the difference is the overhead.
With `rl.rounds_per_task 1` a round is two task runs; `--round-seconds` is how long one takes without them (74 s: `smol`
on two CPU cores, docs/results/smol-first.md).
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from flows import environment

environment.prepare(console_level="CRITICAL")

from prefect import flow  # noqa: E402

from data import storage  # noqa: E402
from data.requests import HoldOutRequest  # noqa: E402
from tasks.steps import Inputs, RunContext, TaskReport, result_of, run_step, step_key, step_task  # noqa: E402

TASKS_A_ROUND = 2


def prepare(folder: Path, tasks: int) -> tuple[RunContext, HoldOutRequest, Inputs]:
    """Published outputs that every step finds complete."""
    run = RunContext(root=str(folder), name="run", timeout=60.0)
    with storage.staging(run.url("input")) as staging:
        (staging / "questions.parquet").write_bytes(b"x" * 100_000)
        ref = storage.publish(staging, run.url("input"), "input")
    inputs = Inputs()
    request = HoldOutRequest(questions=inputs.add(ref) / "questions.parquet")
    key = step_key("data.retraining:hold_out", 1, request, inputs)
    for number in range(tasks):
        with storage.staging(run.url("steps", str(number))) as staging:
            (staging / "questions.parquet").write_bytes(b"x" * 100_000)
            storage.publish(staging, run.url("steps", str(number)), key)
    return run, request, inputs


@step_task("step-{number}")
def step(number: int, run: RunContext, request: HoldOutRequest, inputs: Inputs) -> storage.ArtifactRef:
    """One step as the pipeline has it, with a progress artifact."""
    TaskReport(f"step {number}").progress(1, 1, "done")
    return run_step(f"step {number}", "data.retraining:hold_out", request, run.url("steps", str(number)), inputs, run)


@flow(name="orchestration-benchmark", persist_result=False)
def steps(run: RunContext, request: HoldOutRequest, inputs: dict, tasks: int) -> list[float]:
    """Seconds of each task run."""
    seconds = []
    for number in range(tasks):
        started = time.perf_counter()
        result_of(step(number, run, request, Inputs(inputs)))
        seconds.append(time.perf_counter() - started)
    return seconds


def plain(run: RunContext, request: HoldOutRequest, inputs: Inputs, tasks: int) -> float:
    """Seconds a step of the same work without Prefect."""
    started = time.perf_counter()
    for number in range(tasks):
        key = step_key("data.retraining:hold_out", 1, request, inputs)
        assert storage.find(run.url("steps", str(number)), key)[0] is not None
    return (time.perf_counter() - started) / tasks


def main() -> None:
    """Prints milliseconds a task run and the share of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--round-seconds", type=float, default=74.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, request, inputs = prepare(Path(folder), options.tasks)
        without = plain(run, request, inputs, options.tasks)
        cpu = time.process_time()
        seconds = steps(run, request, inputs, options.tasks)
        cpu = (time.process_time() - cpu) / options.tasks
    middle = statistics.median(seconds) - without
    mean = statistics.fmean(seconds) - without
    print(f"{options.tasks} task runs: median {1000 * middle:.1f} ms, mean {1000 * mean:.1f} ms each beyond the work")
    print(f"of which {1000 * cpu:.1f} ms CPU in this process; the work itself {1000 * without:.1f} ms")
    share = TASKS_A_ROUND * mean / (options.round_seconds + TASKS_A_ROUND * mean)
    print(f"{100 * share:.2f} % of a round of {options.round_seconds:g} s with a task each for rollouts and update")


if __name__ == "__main__":
    main()
