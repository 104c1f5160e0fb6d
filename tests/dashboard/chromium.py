"""Drive a real Chromium over its DevTools protocol: pages, screenshots, console errors."""

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import count as count_up
from pathlib import Path

from tests.waiting import LIMIT, wait_until
from websockets.sync.client import connect

NAMES = (
    "chromium-headless-shell",  # which has no windows to draw
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
INSTALL = "apt-get -qq -o DPkg::Lock::Timeout=300"


def find_browser():
    """Return the path of a browser, or None; with CI=true, install one."""
    path = _find_installed()
    if path is None and os.environ.get("CI") == "true":
        with open(Path(tempfile.gettempdir()) / "pliant-tests-browser.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in parallel, apt does not
            path = _find_installed() or _install()
    return path


def _find_installed():
    return next(filter(None, map(shutil.which, NAMES)), None)


def _install():
    command = f"{INSTALL} update && {INSTALL} install -y --no-install-recommends chromium"
    completed = subprocess.run(["sh", "-c", command], timeout=LIMIT, capture_output=True, text=True)
    path = _find_installed()
    if path is None:
        errors = completed.stderr.strip().splitlines()[-1:] or ["the package has no such program"]
        raise RuntimeError(f"CI=true needs Chromium, but apt-get did not install it: {errors[0]}")
    return path


@contextmanager
def start_browser(folder: Path):
    """Start a browser with this profile folder and yield it."""
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-proxy-server", "--no-first-run", "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
        "--force-color-profile=srgb", "--disable-features=Translate,OptimizationHints",
    ]  # fmt: skip
    with open(folder.parent / "chromium.log", "wb") as log:
        command = [find_browser(), *options, "about:blank"]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        port = wait_until(lambda: _read_port(folder), "the browser to start")
        address = "ws://127.0.0.1:{}{}".format(*port)
        with connect(address, max_size=None, proxy=None, ping_interval=None) as socket:
            yield Browser(socket)
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # a browser may be started by a script
        process.wait(LIMIT)


def _read_port(folder):
    path = folder / "DevToolsActivePort"
    lines = path.read_text().splitlines() if path.exists() else []
    return lines if len(lines) == 2 else None


class Browser:
    """A browser that opens pages."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = count_up(1)
        self._events = []

    def call(self, method, session=None, **values):
        """Call a method and return its result; store events that arrive meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            reply = json.loads(self._socket.recv(timeout=LIMIT))
            if reply.get("id") == number:
                if "error" in reply:
                    raise AssertionError(f"{method}: {reply['error']}")
                return reply["result"]
            self._events.append(reply)

    def open(self, address, *, width=1280, height=900, scheme="light"):
        """Open a page in a window of this size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.set_scheme(scheme)
        page.call("Page.navigate", url=address)
        page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    def events(self, session):
        """Return the events of a page so far."""
        return [event for event in self._events if event.get("sessionId") == session]


class Page:
    """An open page."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def call(self, method, **values):
        return self._browser.call(method, self._session, **values)

    def run(self, code):
        """Evaluate an expression in the page and await a promise."""
        reply = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise AssertionError(f"{code}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def until(self, code):
        """Wait until an expression is true."""
        return wait_until(lambda: self.run(code), code)

    def resize(self, width, height, *, is_phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip

    def set_scheme(self, name):
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """Click the centre of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.run(
            f"(() => {{ const b = {element}.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def save_screenshot(self, path, *, is_full_page=False):
        """Save the visible part, or the full page, as a PNG file."""
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=is_full_page)
        path.write_bytes(base64.b64decode(reply["data"]))

    def get_requested_urls(self):
        """Return the addresses that the page has loaded."""
        self.run("0")
        events = self._browser.events(self._session)
        requests = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in requests]

    def get_errors(self):
        """Return exceptions, and errors and warnings of the console."""
        self.run("0")
        errors = []
        for event in self._browser.events(self._session):
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                errors.append(str(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
                errors.append(str(values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
                errors.append(values["entry"]["text"] + " " + values["entry"].get("url", ""))
        return errors

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def serve(folder, port=0):
    """Serve a folder and yield the page's address; the server must stop in time."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    command = [sys.executable, "-m", "pliant", "dash", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) in (0, 130)
        process.stdout.close()


def count(page, selector):
    return page.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def get_text(page, selector):
    return page.run(f"document.querySelector({json.dumps(selector)}).textContent")


def get_texts(page, selector):
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return page.run(f"{elements}.map(e => e.textContent)")


def get_centre(page, expression):
    code = f"(() => {{ const b = {expression}.getBoundingClientRect();"
    return page.run(f"{code} return [b.left + b.width / 2, b.top + b.height / 2] }})()")


def set_choice(page, name, value, event="onchange"):
    """Choose an option or type a text, as a user does."""
    page.run(
        f"(() => {{ const field = document.querySelector('#{name}'); "
        f"field.value = {json.dumps(value)}; field.{event}() }})()"
    )
