"""The names of docs/metrics.md, for the tests that compare them with what is written."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
LOG_ONLY = "## In the log"
"""The section of what is no row of a table."""


def lines(log: bool = False) -> list[list[str]]:
    """The cells of every row of its tables: of those of metrics.parquet, or of the section on the log."""
    tables, _, rest = DOCUMENT.read_text().partition(LOG_ONLY)
    found = rest if log else tables
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines() if line.startswith("| `")]


ROUNDS = ("Rollouts", "Update", "Validation")
"""Sections on the tables of a cell."""


def documented(*sections: str) -> set[str]:
    """Every name of metrics.parquet that is explained, in the sections whose titles begin so; none: in all."""
    found: set[str] = set()
    for section in DOCUMENT.read_text().partition(LOG_ONLY)[0].split("\n## ")[1:]:
        if section.startswith(sections or ""):
            rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
            found |= {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    return found


def general(name: str) -> str:
    """`accuracy/stage_3` is documented as `accuracy/stage_<i>`, a reward part as `reward/<part>`, and so on."""
    for kind in ("share_<action>", "choice_<state>_<action>", "blocks_<difficulty>", "alarm_<name>"):
        if name.startswith(f"meta/{kind.partition('<')[0]}") and name != "meta/blocks_mean":
            return f"meta/{kind}"
    name = re.sub(r"/stage_\d+$", "/stage_<i>", name)
    name = re.sub(
        r"^[^/]+/(gate_loss|gate_validation_loss|routed_validation_loss|export_difference)$", r"<task>/\1", name
    )
    name = re.sub(r"^[^/]+/jaccard_of_top_\d+/[^/]+/[^/]+$", "<measure>/jaccard_of_top_<k>/<task>/<other>", name)
    name = re.sub(r"^[^/]+/[^/]+/mass_in_top_\d+$", "<measure>/<task>/mass_in_top_<k>", name)
    name = re.sub(r"^[^/]+/[^/]+/gini$", "<measure>/<task>/gini", name)
    name = re.sub(r"^[^/]+/[^/]+/share_of/[^/]+$", "<measure>/<task>/share_of/<expert>", name)
    return "reward/<part>" if name.startswith("reward/") else name
