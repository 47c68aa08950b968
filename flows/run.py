"""`ratchet run`: the pipeline's flow in this process, on the embedded Prefect API or the server that is set."""

import sys
from typing import Any

from data import storage
from data.errors import UserError
from flows import environment, reaper
from flows.settings import RunSettings


def run(preset: str, overrides: dict[str, Any], settings: RunSettings) -> int:
    """Runs the flow, prints the accuracies and the report's path; returns the exit code."""
    environment.prepare(console_level="CRITICAL")
    reaper.watch()
    print(f"run {settings.name!r} in {storage.join(settings.root, settings.name)}", flush=True)
    from tasks import display

    shown = display.for_terminal()
    display.use(shown)
    try:
        from flows.pipeline import reasoning_pipeline
        from tasks.compute import MayPass, StepFailed

        try:
            url = reasoning_pipeline(preset=preset, overrides=overrides)
        finally:
            shown.close()
    except UserError:
        raise
    except (MayPass, StepFailed) as error:
        print(f"ratchet: the run failed; the same command continues it.\n{error}", file=sys.stderr)
        return 1
    from flows.inspect import accuracy_table

    print()
    print(accuracy_table(settings.root, settings.name))
    print(f"report: {storage.join(url, 'report.html')}")
    return 0
