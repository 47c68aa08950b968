"""`ratchet setup`: what a Prefect server needs besides the deployments. Run it as often as you like."""

import os
import time

from data.errors import UserError
from flows import environment
from flows.automations import automations

POOLS = {
    "ratchet": "Runs of Ratchet; a slot is held for the whole run.",
    "ratchet-experts": "Experts of runs that fan out. Apart from the runs that wait for them, so that neither blocks.",
}
WAIT_SECONDS = 180.0


def setup(webhook: str | None = None) -> list[str]:
    """Waits for the server at PREFECT_API_URL and makes the work pools and automations; returns what it did.

    `webhook`: URL that is told of failed runs and refused promotions, kept in a Prefect block as a secret.


    Raises UserError where no server is named or none answers within `WAIT_SECONDS`.
    """
    environment.prepare()
    from prefect.client.orchestration import get_client

    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise UserError("no Prefect server is named; export PREFECT_API_URL=http://127.0.0.1:4200/api")
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + WAIT_SECONDS
        while (problem := client.api_healthcheck()) is not None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the Prefect server at {url} does not answer ({problem}); start it, see `ratchet doctor`"
                )
            time.sleep(1.0)
        pools = [_pool(client, name, text) for name, text in POOLS.items()]
        return [*pools, *automations(client, webhook)]


def _pool(client, name: str, description: str) -> str:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", description=description))
        return f"work pool {name}: made"
    return f"work pool {name}: there"
