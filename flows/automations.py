"""Automations on the Prefect server: runs that died are shown as crashed; a webhook is told what went wrong."""

from datetime import timedelta
from typing import Any

DEAD_AFTER = timedelta(seconds=120)
"""Four heartbeats of 30 s: fewer would take a busy run for a dead one."""
DEAD, FAILED, REFUSED = "ratchet: dead runs crash", "ratchet: failed runs", "ratchet: refused promotions"
BLOCK = "ratchet-webhook"
FAILURES = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}


def automations(client: Any, webhook: str | None) -> list[str]:
    """Makes or renews the automations; those that call the webhook only where one is given. Returns what it did."""
    from prefect.events.actions import CallWebhook, ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.states import StateType

    runs = {"prefect.resource.id": ["prefect.flow-run.*"]}
    wanted = [
        AutomationCore(
            name=DEAD,
            description="A run whose process was lost sends no heartbeat: it is marked Crashed, for a new start",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.*"},
                match=runs,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=DEAD_AFTER,
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process was lost")],
        )
    ]
    if webhook is not None:
        block = _webhook_block(webhook)
        told = '{"event": "{{ event.event }}", "run": "{{ event.resource.name }}", "message": "%s"}'
        wanted += [
            AutomationCore(
                name=FAILED,
                description="A run that failed or crashed is told to the webhook.",
                trigger=EventTrigger(expect=FAILURES, match=runs, posture=Posture.Reactive, threshold=1),
                actions=[CallWebhook(block_document_id=block, payload=told % "the run ended otherwise than Completed")],
            ),
            AutomationCore(
                name=REFUSED,
                description="A candidate that was not promoted is told to the webhook, with the reason.",
                trigger=EventTrigger(
                    expect={"ratchet.promotion.refused"},
                    match={"prefect.resource.id": "ratchet.serving.*"},
                    posture=Posture.Reactive,
                    threshold=1,
                ),
                actions=[CallWebhook(block_document_id=block, payload=told % "{{ event.payload.reason }}")],
            ),
        ]
    return [_renew(client, automation) for automation in wanted]


def _webhook_block(url: str) -> Any:
    from prefect.blocks.webhook import Webhook

    return Webhook(url=url).save(BLOCK, overwrite=True)


def _renew(client: Any, automation: Any) -> str:
    known = client.read_automations_by_name(automation.name)
    if known:
        client.update_automation(known[0].id, automation)
        return f"automation {automation.name!r}: renewed"
    client.create_automation(automation)
    return f"automation {automation.name!r}: made"
