"""What Prefect must be told before it is imported, so that one command works without a server of one's own."""

import os
from pathlib import Path

from data.errors import UserError

DEFAULTS = {
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # a cold database takes longer than Prefect's own limit of 20 s on a slow disk
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # unbatched, an embedded server loses most task runs when the command ends
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # a server that restarts is waited for: the delays double, ten of them last half an hour
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    # the automation of `ratchet setup` takes a run for dead after four missed ones
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
}


def prepare(console_level: str = "ERROR") -> None:
    """Sets what is not set already; call before the first import of prefect. The terminal shows our own lines.

    Raises UserError where PREFECT_HOME cannot be made: Prefect makes no folders above it and would wait three minutes.
    """
    if home := os.environ.get("PREFECT_HOME"):
        try:
            Path(home).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"PREFECT_HOME: {home} cannot be made ({error.strerror}); name a folder to write in"
            ) from None
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", console_level)
