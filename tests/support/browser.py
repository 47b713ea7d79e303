"""Browser: a headless Chromium, driven by the DevTools protocol over two pipes.

this process ── commands, JSON ends with NUL ──► descriptor 3 ─┐
             ◄── answers and events ─────────── descriptor 4 ─┴ chromium --remote-debugging-pipe
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-default-apps", "--mute-audio", "--no-proxy-server",
)  # fmt: skip
START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(one), fcntl.F_DUPFD_CLOEXEC, 10) for one in sys.argv[1:3]]
for place, pipe in enumerate(pipes, 3):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded")


def chromium() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with one page. A context manager.

    trouble: exceptions of the page's scripts, and what its console was told by the browser itself.
    """

    def __init__(self, folder: Path, timeout: float = 20.0) -> None:
        path = chromium()
        assert path is not None, "look for it with chromium() first"
        self.trouble: list[str] = []
        self._timeout, self._rest, self._last_id = timeout, b"", 0
        to_read, self._to_write = os.pipe()
        self._to_read, to_write = os.pipe()
        command = [path, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        arguments = [sys.executable, "-ISc", START, str(to_read), str(to_write), *command]
        self._process = subprocess.Popen(
            arguments, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(120)
        os.close(self._to_read)
        os.close(self._to_write)

    # --- the protocol ---

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command. AssertionError if it is an error, or late."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._timeout
        while (answer := self._next(end)).get("id") != self._last_id:
            if answer.get("method") in TROUBLE:
                self.trouble.append(json.dumps(answer["params"]))
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._to_read], [], [], max(end - time.monotonic(), 0))
            assert readable, "the browser does not answer"
            data = os.read(self._to_read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    # --- the page ---

    def show(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the size of the window, and light or dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith('{url}')")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of the expression once it is true."""
        end = time.monotonic() + self._timeout
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} stays {value!r}; {self.trouble}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.value(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2] }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def picture(self) -> bytes:
        """Return the page as it is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
