"""Headless Chromium through its own debugging protocol: one process for all pages."""

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --disable-dev-shm-usage "
    "--remote-debugging-port=0 --window-size=1400,1600"
).split()


class Browser:
    """A page that is navigated, asked and photographed. Raises RuntimeError where there is no Chromium."""

    def __init__(self, profile: Path):
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise RuntimeError("there is no chromium")
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (address.is_file() and address.read_text().count("\n")):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("chromium did not start")
            time.sleep(0.1)
        port, path = address.read_text().split("\n")[:2]
        self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=30)
        self._number, self._session = 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, url: str, text: str, seconds: float = 60.0) -> str:
        """Opens a page, waits until it shows `text` and all its pictures are loaded, and returns its text."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + seconds
        while True:
            shown = self.value("document.body ? document.body.innerText : ''") or ""
            if text in shown and self.value("[...document.images].every(i => i.complete)"):
                return shown
            assert time.monotonic() < deadline, f"{url} does not show {text!r} but:\n{shown[:2000]}"
            time.sleep(0.2)

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        """Waits until a JavaScript expression is true: diagrams are drawn after the text is there."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not true within {seconds:g} s: {expression}"
            time.sleep(0.2)

    def picture_widths(self, least: int) -> list[int]:
        """Natural widths of the pictures with data of their own; 0 for one that the browser cannot read.

        Waits until the page has at least `least` of them: the text of a page is there before they are.
        """
        pictures = "[...document.images].filter(i => i.src.startsWith('data:'))"
        self.wait(f"{pictures}.length >= {least} && {pictures}.every(i => i.complete)")
        return self.value(f"{pictures}.map(i => i.naturalWidth)")

    def screenshot(self, path: Path) -> None:
        """Writes what is seen as a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends Chromium."""
        self._process.kill()
        self._process.wait()
