"""Reads a run's settings: preset, then a file, then the command line. Fails fast, with field, reason and remedy."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import TomlConfigSettingsSource

from data.errors import UserError
from flows.settings import ArmOverrides, ExpertSettings, RunSettings, SharedSections

PRESETS = Path(__file__).parent / "presets"
SHARED = tuple(SharedSections.model_fields)


def preset_names() -> list[str]:
    """The shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_description(name: str) -> str:
    """The first comment line of a preset."""
    with open(PRESETS / f"{name}.toml", encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def load(preset: str = "tiny", overrides: dict[str, Any] | None = None) -> RunSettings:
    """The resolved settings: the preset with `overrides` (nested: a file's, the command line's) laid over it.

    Raises UserError with one line for each wrong field: its name, the reason and the remedy.
    """
    raw = merge(_preset(preset), overrides or {})
    raw.setdefault("name", preset)
    return resolve(raw)


def resolve(raw: dict[str, Any]) -> RunSettings:
    """Spells the shared sections out in every expert and checks every arm of every expert.

    An expert or an arm that a later layer sets to None (`--experts.svamp null`) is left out.
    """
    raw = dict(raw)
    for tables in ("experts", "arms"):
        if isinstance(raw.get(tables), dict):
            raw[tables] = {name: table for name, table in raw[tables].items() if table is not None}
    shared = {name: raw.pop(name) for name in SHARED if name in raw}
    try:
        SharedSections.model_validate(shared)
        experts = raw.get("experts")
        if isinstance(experts, dict):
            raw["experts"] = {
                name: merge(shared, expert) if isinstance(expert, dict) else expert for name, expert in experts.items()
            }
        settings = RunSettings(**raw)
    except ValidationError as error:
        raise UserError(explain(error)) from None
    for arm in settings.arms:
        for task in settings.experts:
            try:
                cell = arm_settings(settings, task, arm)
            except ValidationError as error:
                raise UserError(explain(error, f"arms.{arm}.")) from None
            _check_arm_reasoning(arm, task, settings.experts[task], cell)
    return settings


def _check_arm_reasoning(arm: str, task: str, expert: ExpertSettings, cell: ExpertSettings) -> None:
    """Raises UserError where an arm changes what its expert's warm-up, which all arms share, was made from."""
    below, above = expert.reasoning, cell.reasoning
    if below.kind != above.kind or getattr(below, "synthesis", None) != getattr(above, "synthesis", None):
        raise UserError(
            f"arms.{arm}.reasoning: kind and synthesis belong to the warm-up, which the arms of expert {task!r} share; "
            "set them in the expert (or add another expert)"
        )


def arm_settings(settings: RunSettings, task: str, arm: str) -> ExpertSettings:
    """What the cell (task, arm) runs: the expert's settings with the arm's overrides laid over them."""
    overrides = {key: value for key, value in settings.arms[arm].model_dump().items() if value}
    return ExpertSettings.model_validate(merge(settings.experts[task].model_dump(), overrides))


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, table by table. A table of another `kind` replaces what is below it."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            other_kind = "kind" in value and value["kind"] != old.get("kind", value["kind"])
            merged[key] = value if other_kind else merge(old, value)
        else:
            merged[key] = value
    return merged


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--rl.prompts 16 --curriculum.kind=none` as nested tables; values are TOML where they can be, else text.

    `null` is None. Raises UserError for an argument that is no `--setting VALUE` pair.
    """
    nested: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or len(name) < 3:
            raise UserError(f"{name!r}: settings are given as --section.setting VALUE")
        name, equals, text = name[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"--{name}: the value is missing; give --{name} VALUE")
            text = rest.pop(0)
        table = nested
        *path, last = name.split(".")
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"--{name}: {part} is given a value elsewhere on the command line; give one of the two")
        table[last] = _value(text)
    return nested


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _preset(name: str) -> dict[str, Any]:
    path = PRESETS / f"{name}.toml"
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"--preset {name!r} does not exist; {hint}choose one of {', '.join(preset_names())}")
    return read_toml(path)


def read_toml(path: Path) -> dict[str, Any]:
    """The nested settings of a TOML file. Raises UserError where it is missing or not TOML."""
    if not path.is_file():
        raise UserError(f"the settings file {path} does not exist; name an existing TOML file")
    try:
        return TomlConfigSettingsSource(RunSettings, toml_file=path)()
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the settings file {path} is not TOML: {error}") from None


_REMEDIES = {
    "missing": "add it to the settings file or give --{field} VALUE",
    "union_tag_not_found": "give --{field}.kind VALUE",
    "int_parsing": "give a whole number",
    "int_type": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "string_type": "give text",
    "string_pattern_mismatch": "use lower-case letters, digits, '_', '-' and '.'",
    "dict_type": "give its keys as --{field}.KEY VALUE",
    "model_type": "give its keys as --{field}.KEY VALUE",
    "model_attributes_type": "give its keys as --{field}.KEY VALUE",
    "tuple_type": 'give a list such as \'["a", "b"]\'',
    "greater_than": "give a number in the range",
    "greater_than_equal": "give a number in the range",
    "less_than": "give a number in the range",
    "less_than_equal": "give a number in the range",
}


def explain(error: ValidationError, prefix: str = "", of: tuple[Any, ...] = (RunSettings, SharedSections)) -> str:
    """One line for each wrong field of a settings error: the field (after `prefix`), the reason, the remedy.

    `of`: the settings classes whose error it is, for the names in a hint.
    """
    lines = []
    for entry in error.errors():
        location = _location(entry)
        field = prefix + (".".join(location) or "settings")
        reason = entry["msg"].removeprefix("Value error, ")
        if entry["type"] == "extra_forbidden":
            known, kind = _known_keys(entry["loc"][:-1], of)
            near = difflib.get_close_matches(location[-1], known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            where = f" with kind {kind!r}" if kind else ""
            names = ", ".join(known) or "none"
            lines.append(f"{field}: there is no such setting{where}; {hint}the settings here are {names}")
        elif entry["type"] == "union_tag_invalid":
            context = entry["ctx"]
            lines.append(f"{field}.kind: there is no kind {context['tag']!r}; choose one of {context['expected_tags']}")
        elif entry["type"] == "value_error":
            lines.append(reason if not location else f"{field}: {reason}")
        else:
            reason = reason[0].lower() + reason[1:]
            given = entry["input"]
            shown = "" if isinstance(given, dict) else f" (it is {given!r})"
            remedy = _REMEDIES.get(entry["type"])
            lines.append(f"{field}: {reason}{shown}" + (f"; {remedy.format(field=field)}" if remedy else ""))
    return "\n".join(dict.fromkeys(lines))


def _location(entry: Any) -> list[str]:
    """The path of an error as the user writes it: without the tags that pydantic adds for the kind of a table."""
    location: list[str] = []
    tags = _tags()
    for part in entry["loc"]:
        if part in tags and location and location[-1] in _UNION_FIELDS:
            continue
        location.append(str(part))
    return location


_UNION_FIELDS = {"model", "parameters", "engine", "source", "prompt", "curriculum", "reasoning", "advantage", "loss"}
_UNION_FIELDS |= {"router"}


def _tags() -> set[str]:
    return {cls.model_fields["kind"].default for cls in _classes() if "kind" in cls.model_fields}


def _classes() -> list[Any]:
    """Every settings class below RunSettings."""
    found: list[Any] = []
    queue: list[Any] = [RunSettings, SharedSections, ExpertSettings, ArmOverrides]
    while queue:
        item = queue.pop()
        if isinstance(item, type) and hasattr(item, "model_fields"):
            if item not in found:
                found.append(item)
                queue.extend(field.annotation for field in item.model_fields.values())
        else:
            queue.extend(getattr(item, "__args__", ()))
    return found


def _known_keys(location: Sequence[Any], of: tuple[Any, ...]) -> tuple[list[str], str | None]:
    """The settings that exist at a place of pydantic's, for the hint of an unknown key; and the kind of its table."""
    classes: list[Any] = list(of)
    kind = None
    for part in location:
        of_kind = [cls for cls in classes if "kind" in cls.model_fields and cls.model_fields["kind"].default == part]
        kind = part if of_kind else None
        if of_kind:
            classes = of_kind
            continue
        inside: list[Any] = []
        for cls in classes:
            if part in cls.model_fields:
                inside.extend(_classes_of(cls.model_fields[part].annotation))
        classes = inside or classes  # the name of an expert or an arm: its class is already there
    return sorted({name for cls in classes for name in cls.model_fields}), kind


def _classes_of(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [cls for item in getattr(annotation, "__args__", ()) for cls in _classes_of(item)]
