"""A thousand runs and a record file of 200 MB: fast to open, small in memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dashboard.chromium import find_browser, start_browser
from tests.dashboard.written_runs import HEADER_LINE, make_lines, write_run
from tests.waiting import LIMIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="install Chromium to test the pages"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("many") / "runs"
    for number in range(1000):
        method = f"m{number % 10}"
        write_run(runs / f"method={method},seed={number}", method={"type": method}, seed=number)
    big = write_run(runs / "big")
    round_lines = make_lines(0, tasks=10, steps=60)
    with open(big / "events.jsonl", "wb") as file:
        file.write(HEADER_LINE)
        number = 0
        while file.tell() < 200e6:
            file.write(round_lines.replace(b'"round":0', b'"round":%d' % number))
            number += 1
    return runs


def test_a_thousand_runs_and_200_megabytes(folder, tmp_path):
    command = [sys.executable, "-m", "pliant", "dash", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    (tmp_path / "profile").mkdir()
    try:
        address = server.stdout.readline().strip()
        with start_browser(tmp_path / "profile") as browser:
            page = browser.open(address)
            page.until("document.querySelectorAll('#list .group').length === 11")
            page.until("document.querySelector('#count').textContent === '1001'")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
            assert page.until(paint) < 1000
            page.until("document.querySelector('#newest').textContent.includes('big')")
            assert page.get_errors() == []
        status = Path(f"/proc/{server.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        assert int(peak) < 300_000  # kB
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(LIMIT)
        server.stdout.close()
