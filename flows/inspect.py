"""`ratchet show`: what a run's folder says of the run."""

from data import storage
from data.artifacts import MANIFEST, read_rows
from data.errors import UserError


def run_settings(root: str, name: str) -> dict:
    """The settings a run was started with. Raises UserError where there is no such run."""
    settings = storage.read_json(storage.join(root, name, "settings.json"))
    if settings is None:
        raise UserError(
            f"there is no run {name!r} in {root}; `ratchet run --name {name}` starts it, --root names a folder"
        )
    return settings


def accuracy_table(root: str, name: str) -> str:
    """The accuracies of a finished run as text, one line a task and model."""
    found, reason = storage.find(storage.join(root, name, "report"))
    if found is None:
        return f"no accuracies yet: the report is {reason}"
    rows = read_rows(storage.fetch(found) / "summary.parquet", "summary")
    lines = [f"{'task':<14}{'model':<12}{'accuracy':>9}  {'95 % interval':<16}{'n':>6}{'generated tokens':>18}"]
    for row in rows:
        if row["split"] != "test":
            continue
        interval = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        tokens = "" if row["generated_tokens"] is None else f"{row['generated_tokens']:,}"
        accuracy = f"{100 * row['accuracy']:.1f} %"
        lines.append(f"{row['task']:<14}{row['model']:<12}{accuracy:>9}  {interval:<16}{row['n']:>6}{tokens:>18}")
    return "\n".join(lines)


def show(root: str, name: str) -> str:
    """The run's steps with their state, then its accuracies."""
    settings = run_settings(root, name)
    places = [f"demonstrations/{task}" for task in settings["experts"]] + ["base"]
    for task in settings["experts"]:
        places.append(f"experts/{task}/warmup")
        for arm in settings["arms"]:
            places += [f"experts/{task}/{arm}/start_states", f"experts/{task}/{arm}/{settings['seed']}/result"]
    places += ["loracoe"] if settings["composition"]["enabled"] and len(settings["experts"]) > 1 else []
    places.append("report")
    lines = [f"run {name} in {root}, seed {settings['seed']}"]
    for place in places:
        url = storage.join(root, name, place)
        manifest = storage.read_json(storage.join(url, MANIFEST))
        size = sum(entry["bytes"] for entry in manifest["files"].values()) if manifest else 0
        lines.append(f"  {place:<44} {'complete, ' + format(size, ',') + ' bytes' if manifest else 'not made yet'}")
    return "\n".join([*lines, "", accuracy_table(root, name)])
