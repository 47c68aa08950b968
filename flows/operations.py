"""The commands that keep a system of runs going: their arguments and handlers. Heavy imports stay in the handlers."""

import argparse
from collections.abc import Callable

Handler = Callable[[argparse.Namespace], int]


def add_commands(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Adds the commands' arguments; `command` makes a subparser of a name and a text."""
    command("setup", "Make the work pools that the deployments use on the Prefect server at PREFECT_API_URL.")


def _setup(options: argparse.Namespace) -> int:
    from flows.setup import setup

    for line in setup():
        print(line)
    return 0


HANDLERS: dict[str, Handler] = {"setup": _setup}
