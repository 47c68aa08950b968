"""What was made from what: the run's tables and models as a chain, and as a mermaid diagram."""

from dataclasses import dataclass

from data.report.content import Content
from data.report.text import count, mermaid_label, plural, short_count


@dataclass(frozen=True)
class Node:
    """One link of the chain."""

    key: str
    title: str
    detail: str
    table: bool = False
    """Drawn as a store rather than a step."""


def chain(content: Content) -> list[list[Node]]:
    """The stages of the run that have files, in order; the arms of one stage side by side."""
    found: list[list[Node]] = []
    if content.ingested:
        accepted = sum(sum(task.accepted.values()) for task in content.ingested)
        rejected = sum(task.rejected for task in content.ingested)
        detail = f"{plural(len(content.ingested), 'task')}, {count(accepted)} accepted, {count(rejected)} rejected"
        found.append([Node("demonstrations", "Demonstrations", detail, table=True)])
        starts = sum(sum(task.start_states.values()) for task in content.ingested)
        if starts:
            stages = max(len(task.start_states) for task in content.ingested)
            detail = f"{count(starts)} in {plural(stages, 'stage')}"
            found.append([Node("start_states", "Start states", detail, table=True)])
    if "warmup" in content.models or content.arms:
        found.append([Node("warmup", "Warm-up", "supervised, on the demonstrations")])
    if content.arms:
        found.append([_arm(content, arm, i) for i, arm in enumerate(content.arms)])
    if content.importance:
        detail = (
            f"{plural(content.importance.n_ranks, 'rank')}, gates for {plural(len(content.importance.tasks), 'task')}"
        )
        found.append([Node("composed", "Composed", detail)])
    if content.summary:
        questions = sum({row.column: row.n for row in content.summary}.values())
        detail = f"{plural(len(content.models), 'model')}, {plural(questions, 'question')}"
        found.append([Node("evaluation", "Evaluation", detail, table=True)])
    return found


def _arm(content: Content, arm: str, i: int) -> Node:
    spent = [n for (name, _), n in content.training.tokens.items() if name == arm]
    tasks = len({cell.task for cell in content.request.cells if cell.arm == arm})
    tokens = f", {short_count(sum(spent))} tokens" if spent else ""
    return Node(f"arm{i}", f"Rounds: {arm}", f"{plural(tasks, 'expert')}{tokens}")


def edges(content: Content, keys: set[str]) -> list[tuple[str, str]]:
    """Which links were made from which, among `keys`."""
    arms = {f"arm{i}": arm for i, arm in enumerate(content.arms)}
    known = content.request.composed_arm in content.arms
    composed = [key for key, arm in arms.items() if not known or arm == content.request.composed_arm]
    wanted = [("demonstrations", "start_states"), ("demonstrations", "warmup")]
    wanted += [(source, arm) for arm in arms for source in ("start_states", "warmup")]
    wanted += [(arm, "composed") for arm in composed]
    wanted += [(model, "evaluation") for model in ("warmup", *arms, "composed")]
    return [edge for edge in wanted if set(edge) <= keys]


def mermaid(content: Content) -> str:
    """The lineage as a fenced mermaid flowchart; an empty string where nothing was made."""
    nodes = [node for stage in chain(content) for node in stage]
    if not nodes:
        return ""
    lines = ["```mermaid", "flowchart LR"]
    for node in nodes:
        left, right = ("[(", ")]") if node.table else ("[", "]")
        lines.append(f'  {node.key}{left}"{mermaid_label(node.title)}<br/>{mermaid_label(node.detail)}"{right}')
    lines += [f"  {before} --> {after}" for before, after in edges(content, {node.key for node in nodes})]
    return "\n".join([*lines, "```"])
