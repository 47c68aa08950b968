"""The report in a browser: it follows the reader's light or dark preference, and fits a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from data.progress import Silent
from data.report.build import build
from data.report.request import ReportRequest
from tests.data import report_files as made

pytestmark = pytest.mark.chromium
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root, out = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("report")
    evaluations = [
        made.evaluation(root / f"{model}-{task}.parquet", model, task, [True] * right + [False] * 5)
        for right, model in enumerate(("base", "warmup", "plain_rl", "r3", "composed"), 1)
        for task in made.TASKS
    ]
    cells = [made.cell(root / arm, "words", arm, rounds=20) for arm in made.ARMS]
    build(ReportRequest(run_name="tiny", evaluations=tuple(evaluations), cells=tuple(cells)), out, Silent())
    return out / "report.html"


def screenshot(page: Path, name: str, width: int, *flags: str) -> Image.Image:
    """The page's upper 1600 pixels as headless Chromium draws them."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("headless Chromium is not installed")
    target = page.with_name(name)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *flags]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},1600", f"--screenshot={target}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    return Image.open(target).convert("RGB")


def test_the_page_is_light_or_dark(page):
    light = screenshot(page, "light.png", 1100)
    dark = screenshot(page, "dark.png", 1100, "--blink-settings=preferredColorScheme=0")
    assert light.getpixel((3, 3)) == (255, 255, 255) and dark.getpixel((3, 3)) == (0x17, 0x1B, 0x21)
    # The pictures follow: no white panel is left on the dark page.
    counts = dict((colour, n) for n, colour in dark.getcolors(1 << 24))
    assert counts.get((255, 255, 255), 0) < 0.001 * dark.width * dark.height


def test_the_page_fits_a_phone(page):
    """The wide table scrolls inside its own box: nothing reaches the page's right margin."""
    phone = screenshot(page, "phone.png", 500)
    assert phone.crop((phone.width - 10, 0, phone.width, phone.height)).getcolors() == [(16000, (255, 255, 255))]
