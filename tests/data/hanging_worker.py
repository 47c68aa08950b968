"""A worker for the tests of worker pools: it echoes, or hangs in a way that no exception ends."""

import signal
import time

from data.workers import serve


def answer(message: dict) -> dict:
    """Echoes the message, or never comes back."""
    if "hang" in message:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                continue
    return message


def main() -> None:
    """Entry point of the worker process."""
    serve(answer)
