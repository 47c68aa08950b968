"""Types of flow parameters: what a form in Prefect's UI offers. The help texts stand in the flows' docstrings."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flows import config
from flows.settings import NAME

PRESETS = tuple(config.preset_names())

Preset = Literal[PRESETS]
"""A shipped preset, offered as a list."""
RunName = Annotated[str, Field(pattern=NAME)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=1)]
FanOut = Literal["in_process", "deployment_runs"]
Split = Literal["test", "validation", "promotion"]
Questions = Annotated[int, Field(ge=1)]
Confidence = Annotated[float, Field(gt=0, lt=1)]
Overrides = dict[str, Any]


def load(
    preset: str,
    overrides: Overrides | None,
    *,
    name: str | None = None,
    root: str | None = None,
    seed: int | None = None,
    generated_tokens: int | None = None,
    fan_out: str | None = None,
):
    """The settings of a flow's parameters: those that are given lie over `overrides`, which lie over the preset.

    A local root is made absolute. Raises UserError as `config.load` does.
    """
    from data import storage

    given: dict[str, Any] = {"name": name, "root": root, "seed": seed}
    given = {key: value for key, value in given.items() if value is not None}
    if generated_tokens is not None:
        given["rl"] = {"generated_tokens": generated_tokens}
    if fan_out is not None:
        given["compute"] = {"fan_out": fan_out}
    settings = config.load(preset, overrides=config.merge(overrides or {}, given))
    return settings.model_copy(update={"root": storage.absolute(settings.root)})
