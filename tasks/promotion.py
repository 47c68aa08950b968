"""What Prefect is told of a retraining: the decision as artifact and event, the lineage, the versions."""

from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from data import serving as store
from data.retraining import shown_accuracy
from data.serving import Served
from data.storage import ArtifactRef
from tasks.api import patiently
from tasks.steps import artifact_key

PROMOTED, REFUSED, NOTHING_NEW = "ratchet.promotion.accepted", "ratchet.promotion.refused", "ratchet.retraining.empty"


def announce(
    serving: str,
    identifier: str,
    decision: dict[str, Any],
    ingested: ArtifactRef,
    new: ArtifactRef,
    base: ArtifactRef,
    candidate: ArtifactRef,
    before: Served | None,
    now: Served | None,
) -> None:
    """The decision as a Markdown artifact with its lineage, the versions as a table, an event for automations."""
    promoted = decision["promote"]
    verdict = f"version {now.version} promoted" if promoted and now else "not promoted"
    figures = {
        model: shown_accuracy(decision[model], decision["questions"], decision["confidence"])
        for model in ("candidate", "serving")
    }
    low, high = 100 * decision["low"], 100 * decision["high"]
    against = f"version {before.version}" if before else "the base"
    text = f"""# {verdict.capitalize()}

{decision["retraining"]} was compared with {against} on the same {decision["questions"]} promotion questions:
{decision["reason"]}.

| model | accuracy, {100 * decision["confidence"]:g} % interval |
|---|---|
| candidate | {figures["candidate"]} |
| {against} | {figures["serving"]} |
| difference | {100 * decision["difference"]:+.1f} points [{low:+.1f}, {high:+.1f}] |

{lineage(ingested, new, base, candidate, decision, before, now)}
"""
    key = artifact_key(identifier)
    patiently(create_markdown_artifact, text, key=f"{key}-decision", description=f"{verdict}: {decision['reason']}")
    patiently(create_table_artifact, version_rows(serving), key=f"{key}-versions", description=f"Versions in {serving}")
    _emit(PROMOTED if promoted else REFUSED, identifier, serving, decision)


def announce_nothing_new(identifier: str, message: str, version: int | None) -> None:
    """The decision's artifact says that there was nothing to decide."""
    key = artifact_key(identifier)
    patiently(create_markdown_artifact, f"# Nothing new\n\n{message}.\n", key=f"{key}-decision", description=message)
    _emit(NOTHING_NEW, identifier, identifier, {"reason": message, "version": version})


def _emit(event: str, identifier: str, name: str, payload: dict[str, Any]) -> None:
    resource = {"prefect.resource.id": f"ratchet.serving.{identifier}", "prefect.resource.name": name}
    emit_event(event, resource=resource, payload=payload)


def version_rows(serving: str) -> list[dict[str, str]]:
    """The versions as rows for people, newest first."""
    current = store.current(serving)
    rows = []
    for served in reversed(store.versions(serving)):
        info = served.ref.info
        rows.append(
            {
                "version": str(served.version),
                "serves": "yes" if current is not None and current.version == served.version else "",
                "accuracy": f"{100 * info['candidate']:.1f} %",
                "better by": f"{100 * info['difference']:+.1f} [{100 * info['low']:+.1f}, {100 * info['high']:+.1f}]",
                "than": "the base" if info["compared_with"] is None else f"version {info['compared_with']}",
                "questions": str(info["questions"]),
                "retraining": info["retraining"],
                "sha256": served.ref.sha256[:12],
            }
        )
    return rows


def lineage(
    ingested: ArtifactRef,
    new: ArtifactRef,
    base: ArtifactRef,
    candidate: ArtifactRef,
    decision: dict[str, Any],
    before: Served | None,
    now: Served | None,
) -> str:
    """From the demonstrations to the serving model as a mermaid diagram, with row counts and hashes."""
    nodes = [
        f'demonstrations[("demonstrations<br/>{ingested.info["accepted"]} rows, {_short(ingested)}")]',
        f'new[("new<br/>{new.info["new"]} rows, {_short(new)}")]',
        f'base["base<br/>{_short(base)}"]',
        f'candidate["candidate<br/>{candidate.info["generated_tokens"]} tokens, {_short(candidate)}"]',
        f'decision{{"{decision["difference"] * 100:+.1f} points on {decision["questions"]} questions"}}',
    ]
    edges = ["demonstrations --> new --> candidate --> decision", "base --> candidate"]
    if before is not None:
        nodes.append(f'before["version {before.version}<br/>{_short(before.ref)}"]')
        edges += ["before -->|warm start| candidate", "before --> decision"]
    if decision["promote"] and now is not None:
        nodes.append(f'now["version {now.version}<br/>{_short(now.ref)}"]')
        edges.append("decision -->|promoted| now")
    else:
        edges.append("decision -->|kept| " + ("before" if before else "base"))
    return "\n".join(["```mermaid", "flowchart LR", *(f"  {line}" for line in [*nodes, *edges]), "```"])


def _short(ref: ArtifactRef) -> str:
    return ref.sha256[:8]
