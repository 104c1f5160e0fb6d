"""A real Chromium, driven over its DevTools protocol: pages, pictures, what the console said."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "apt-get -qq -o DPkg::Lock::Timeout=300"


def program():
    """Return the path of a browser; None if there is none. With CI=true one is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true":
        with open(Path(tempfile.gettempdir()) / "pliant-tests-browser.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side, apt does not
            found = next(filter(None, map(shutil.which, NAMES)), None) or _installed()
    return found


def _installed():
    get = f"{INSTALL} update && {INSTALL} install -y --no-install-recommends chromium"
    done = subprocess.run(["sh", "-c", get], timeout=600, capture_output=True, text=True)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        told = done.stderr.strip().splitlines()[-1:] or ["no program of that name came with it"]
        raise RuntimeError(f"CI=true wants a Chromium, and apt-get gave none: {told[0]}")
    return found


@contextmanager
def browser(folder: Path):
    """Start a browser with a profile of its own and yield it."""
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-proxy-server", "--no-first-run", "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
        "--force-color-profile=srgb", "--disable-features=Translate,OptimizationHints",
    ]  # fmt: skip
    with open(folder.parent / "chromium.log", "wb") as log:
        process = subprocess.Popen([program(), *options, "about:blank"], stdout=log, stderr=log)
    try:
        port = wait(lambda: _port(folder), "the browser to start")
        address = "ws://127.0.0.1:{}{}".format(*port)
        with connect(address, max_size=None, proxy=None, ping_interval=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(20)


def _port(folder):
    path = folder / "DevToolsActivePort"
    lines = path.read_text().splitlines() if path.exists() else []
    return lines if len(lines) == 2 else None


def wait(seen, what, seconds=60):  # long, for machines that are busy
    """Return the first true answer; fail if there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = seen()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}, in vain")


class Browser:
    """A browser that opens pages."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = count(1)
        self._events = []

    def call(self, method, session=None, **values):
        """Ask for something and return the answer; what happens meanwhile is kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            got = json.loads(self._socket.recv(timeout=60))
            if got.get("id") == number:
                if "error" in got:
                    raise AssertionError(f"{method}: {got['error']}")
                return got["result"]
            self._events.append(got)

    def open(self, address, *, width=1280, height=900, scheme="light"):
        """Open a page in a window of this size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.scheme(scheme)
        page.call("Page.navigate", url=address)
        page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    def events(self, session):
        """Return what has happened in a page."""
        return [event for event in self._events if event.get("sessionId") == session]


class Page:
    """An open page."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def call(self, method, **values):
        return self._browser.call(method, self._session, **values)

    def run(self, code):
        """Evaluate an expression in the page; a promise is waited for."""
        got = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise AssertionError(f"{code}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def until(self, code, seconds=60):
        """Wait until an expression is true."""
        return wait(lambda: self.run(code), code, seconds)

    def resize(self, width, height, *, is_phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip

    def scheme(self, name):
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """Press the mouse in the middle of an element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.run(
            f"(() => {{ const b = {where}.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def picture(self, path, *, whole=False):
        """Save what is seen, or the whole page, as a PNG file."""
        got = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))

    def addresses(self):
        """Return what the page has loaded."""
        self.run("0")
        events = self._browser.events(self._session)
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def faults(self):
        """Return errors and warnings of the console, and exceptions."""
        self.run("0")
        found = []
        for event in self._browser.events(self._session):
            values = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in (
                "error",
                "warning",
            ):
                found.append(str(values["args"]))
            elif event["method"] == "Log.entryAdded" and values["entry"]["level"] == "error":
                found.append(values["entry"]["text"] + " " + values["entry"].get("url", ""))
        return found

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)
