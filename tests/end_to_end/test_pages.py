"""Every artifact page of a run in the UI, in headless Chromium: its text, its diagram, pictures that are really shown.

RATCHET_SCREENSHOTS=1 renews the pictures of docs/images.
"""

import os

import pytest

from tests.end_to_end.browser import Browser
from tests.end_to_end.conftest import ROOT

pytestmark = [pytest.mark.prefect, pytest.mark.chromium]

PAGES = [
    # key, text that the page shows, pictures at least, a diagram
    ("two-experts-accuracy", "composed", 0, False),
    ("two-experts-report", "Learning curves", 1, True),
    ("two-experts-samples", "Written by the policy", 0, False),
    ("two-experts-data", "No row was rejected", 0, False),
    ("two-experts-ranks", "ranks gated on", 1, False),
    ("warm-up-state", "100", 0, False),
]
SHOWN = ("report", "samples", "ranks")
"""Whose pictures docs/operations.md has."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.mark.parametrize(("key", "text", "pictures", "diagram"), PAGES)
def test_an_artifacts_page_shows_its_text_and_pictures(server, one_process, browser, key, text, pictures, diagram):
    identifier = server.artifacts()[key]["latest_id"]
    browser.open(f"http://127.0.0.1:{server.port}/v2/artifacts/artifact/{identifier}", text)
    widths = browser.picture_widths(pictures)
    assert all(width > 100 for width in widths)
    if diagram:
        browser.open(f"http://127.0.0.1:{server.port}/v2/artifacts/artifact/{identifier}", "Start states")
        browser.wait("[...document.querySelectorAll('svg')].some(s => s.textContent.includes('Warm-up'))")
    if os.environ.get("RATCHET_SCREENSHOTS") and key.removeprefix("two-experts-") in SHOWN:
        browser.screenshot(ROOT / "docs" / "images" / f"artifact-{key.removeprefix('two-experts-')}.png")


def test_the_form_of_a_deployment_offers_presets_and_help(server, one_process, browser):
    found = server.post("deployments/filter", {"flows": {"name": {"any_": ["reasoning-pipeline"]}}})
    url = f"http://127.0.0.1:{server.port}/v2/deployments/deployment/{found[0]['id']}/run"
    shown = browser.open(url, "Budget of an arm in generated tokens")
    assert "The shipped settings to start from" in shown and "fan_out" in shown.lower().replace(" ", "_")
    if os.environ.get("RATCHET_SCREENSHOTS"):
        browser.screenshot(ROOT / "docs" / "images" / "deployment-form.png")
