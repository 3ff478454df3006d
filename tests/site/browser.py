"""A headless Chromium that tests look at pages with, over the pipe of its debugging protocol: no driver, no port."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run"
#: Seconds until a page must have loaded, or a search must have found something.
PATIENCE = 60


class Browser:
    """One window, in which pages are opened one after the other."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and keep the events that come before its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            found = self._next(end)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._received += more
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self._events.append(message)
        return message

    def open(self, address: str | Path, width: int = 1400, height: int = 900) -> None:
        """Open a file or an address, and return when the page has loaded."""
        self._events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        shown = self.call("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        assert "errorText" not in shown, f"{address}: {shown['errorText']}"
        end = time.monotonic() + PATIENCE
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next(end)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the open page another width."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the open page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def faults(self, address: str | Path, widths: tuple[int, ...] = (1400, 400)) -> list[str]:
        """Open a page, and return what is wrong with it.

        That is errors and warnings on its console, addresses that it asked a network for, pictures that it has not, and
        by how many pixels it is wider than a window of these widths.
        """
        self.open(address, widths[0])
        wrong = []
        for width in widths:
            self.resize(width)
            over = self.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
            wrong += [f"{over} pixels wider than {width}"] if over > 0 else []
        broken = self.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
        return [*wrong, *(f"no picture {address}" for address in broken), *self.said()]

    def said(self) -> list[str]:
        """Return what the open page has said on its console, and asked a network for, since it was opened."""
        found = []
        for event in self._events:
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert", "warning"):
                found.append(str(values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(str(values["entry"]))
            elif method == "Network.requestWillBeSent":
                address = values["request"]["url"]
                found += [] if address.startswith(("file:", "data:", "blob:", "about:")) else [f"asked {address}"]
        return found


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are not among the numbers that the browser expects its own at."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]


@contextlib.contextmanager
def started(program: str) -> Iterator[Browser]:
    """Start a browser, which ends with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, contextlib.ExitStack() as ends:
        read_commands, write_commands = _pipe()
        read_events, write_events = _pipe()
        options = f"{OPTIONS} --remote-debugging-pipe --user-data-dir={home}"
        command = f'exec "$0" {options} 3<&{read_commands} 4>&{write_events}'
        process = subprocess.Popen(
            ["bash", "-c", command, program],
            pass_fds=(read_commands, write_events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": home},
        )
        ends.callback(process.wait)
        ends.callback(process.kill)
        os.close(read_commands)
        os.close(write_events)
        yield Browser(read_events, write_commands)
