"""Calls of Prefect's API that a lost connection does not end.

Prefect's own client waits for a server that goes away (PREFECT_CLIENT_MAX_RETRIES), but only where it has reached it
before; artifacts are made by a new client each time.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from prefect import get_run_logger

Answer = TypeVar("Answer")

PATIENCE_SECONDS = 600.0
FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0
LOST = (httpx.TransportError, ConnectionError)

_told = False


def patiently(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Calls the API, again after a growing delay where the server is not reached, for `PATIENCE_SECONDS`.

    Raises what the last try raised.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    delay = FIRST_DELAY
    while True:
        try:
            return call(*arguments, **named)
        except LOST:
            if time.monotonic() + delay > deadline:
                raise
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)


def if_reached(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer | None:
    """Calls the API; None where the server is not reached, which is said once. For what is only shown: progress."""
    global _told
    try:
        return call(*arguments, **named)
    except LOST as error:
        if not _told:
            _told = True
            get_run_logger().warning("Prefect's server is not reached (%s): progress is not shown meanwhile", error)
        return None
