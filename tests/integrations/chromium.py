"""A browser without a window, told what to do over two pipes (the DevTools protocol)."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "about:blank",
)
PATIENCE = 120.0  # seconds for an answer, on a busy machine too


def found() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """``with Browser(folder) as browser: tab = browser.open(file, width, dark=False)``"""

    def __init__(self, folder: Path) -> None:
        program = found()
        assert program is not None
        # The browser reads commands from its file 3 and answers on its file 4. Numbers in between
        # are kept clear of these two, as one is closed after the other.
        reads, self.to = (_high(one) for one in os.pipe())
        self.back, writes = (_high(one) for one in os.pipe())
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [
            (os.POSIX_SPAWN_DUP2, quiet, 1),
            (os.POSIX_SPAWN_DUP2, quiet, 2),
            (os.POSIX_SPAWN_DUP2, reads, 3),
            (os.POSIX_SPAWN_DUP2, writes, 4),
        ]
        arguments = [program, f"--user-data-dir={folder}", *FLAGS]
        env = {**os.environ, "HOME": str(folder)}
        self.pid = os.posix_spawn(program, arguments, env, file_actions=actions, setpgroup=0)
        for one in (reads, writes, quiet):
            os.close(one)
        self.number, self.rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.to)  # which ends it
        deadline = time.monotonic() + 10
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.05)
        os.close(self.back)

    def call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """What it answers; what happens in the meantime goes to ``events``."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": given}
        if session is not None:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._message()
            if said.get("id") == self.number:
                assert "error" not in said, said
                return said["result"]
            self.events.append(said)

    def wait(self, method: str, session: str) -> None:
        """Until it happens, if it has not already."""
        while not any(self._is(one, method, session) for one in self.events):
            self.events.append(self._message())

    @staticmethod
    def _is(event: dict[str, Any], method: str, session: str) -> bool:
        return event.get("method") == method and event.get("sessionId") == session

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.back], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            got = os.read(self.back, 1 << 16)
            assert got, "the browser has ended"
            self.rest += got
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def open(
        self,
        file: Path | str,
        width: int,
        *,
        dark: bool = False,
        scripts: bool = True,
        height: int = 900,
    ) -> "Tab":
        """``file``: a page on disk, or an address."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(self, found["sessionId"], target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab("Emulation.setEmulatedMedia", features=[scheme])
        tab("Emulation.setScriptExecutionDisabled", value=not scripts)
        tab.size(width, height)
        address = file if isinstance(file, str) else file.absolute().as_uri()
        tab("Page.navigate", url=address)
        self.wait("Page.loadEventFired", tab.session)
        return tab


class Tab:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def __call__(self, method: str, **given: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **given)

    def size(self, width: int, height: int) -> None:
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """The value of an expression, which must be plain."""
        said = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings on the console."""
        bad = []
        for event in self.own():
            method, given = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                bad.append(str(given["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
                bad.append(str(given["args"]))
            elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                bad.append(str(given["entry"]))
        return bad

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = (one for one in self.own() if one["method"] == "Network.requestWillBeSent")
        return [one["params"]["request"]["url"] for one in sent]

    def own(self) -> list[dict[str, Any]]:
        return [one for one in self.browser.events if one.get("sessionId") == self.session]

    def pixels(self, name: str) -> bytes:
        """An element as a PNG."""
        part = self.run(
            f"""(() => {{
              const one = document.getElementById("{name}");
              one.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = one.getBoundingClientRect();
              return {{ x: box.left + scrollX, y: box.top + scrollY, width: box.width,
                height: box.height, scale: 1 }};
            }})()"""
        )
        said = self("Page.captureScreenshot", clip=part)
        return base64.b64decode(said["data"])

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)


def _high(file: int) -> int:
    """The same file under a number above those that the browser uses."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(file)
    return moved
