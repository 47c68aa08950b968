"""Peak memory and CPU time of log-probabilities with a large vocabulary: whole logits against chunks.

    python benchmarks/vocabulary_memory.py [--tokens 1024] [--chunk 8192]

A random one-layer Llama (hidden 64) scores completions under vocabularies of 32,000 and 128,256 entries; each case runs
in a process of its own, with and without a gradient, and prints by how much its peak memory rose over the loaded model.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def peak() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def case(vocabulary: int, tokens: int, chunk: int, gradient: bool) -> None:
    """Prints MiB and CPU seconds of one pass (and its gradient)."""
    import torch

    from models.scoring import TokenRow, completion_logprobs
    from tests.tiny import tiny_llama

    model = tiny_llama(vocabulary=vocabulary, hidden=64, layers=1, context=4096)
    rows = [TokenRow([1, 5], [7 + i % 90 for i in range(tokens // 8)]) for _ in range(8)]
    completion_logprobs(model, [TokenRow([1], [2])], vocabulary_chunk=64)
    loaded, began = peak(), time.process_time()
    with torch.set_grad_enabled(gradient):
        found = torch.cat(completion_logprobs(model, rows, vocabulary_chunk=chunk))
        if gradient:
            found.sum().backward()
    print(f"{peak() - loaded:.0f} {time.process_time() - began:.2f}")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--case", nargs=3, type=int, metavar=("VOCABULARY", "CHUNK", "GRADIENT"))
    options = parser.parse_args()
    if options.case:
        vocabulary, chunk, gradient = options.case
        case(vocabulary, options.tokens, chunk, bool(gradient))
        return
    print("| vocabulary | pass | whole: MiB, CPU s | chunks: MiB, CPU s |\n|---|---|---|---|")
    for vocabulary in (32_000, 128_256):
        for gradient in (0, 1):
            found = []
            for chunk in (0, options.chunk):
                command = [sys.executable, __file__, "--tokens", str(options.tokens), "--case"]
                command += [str(vocabulary), str(chunk), str(gradient)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(", ".join(done.stdout.split()))
            name = "with its gradient" if gradient else "scoring"
            print(f"| {vocabulary:,} | {name} | {found[0]} | {found[1]} |", flush=True)


if __name__ == "__main__":
    main()
