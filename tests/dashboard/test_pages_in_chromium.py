"""The dashboard and the report in a real Chromium: what a person sees and does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from chromium import browser, program, wait
from written import lines, write_run

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: install it to test the pages"
)
CLEAN = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
ROUNDS = 8
SMALL = f"""
rounds = {ROUNDS}
per_round = 3
workers = {{ type = "inline" }}
method = {{ type = "distreal", local = {{ batch = 64 }} }}
fleet = {{ size = 8, speed = {{ type = "changing", low = 0.3333, high = 1.0, per_round = 2.0 }} }}
rules = {{ late = "partial" }}
"""


def pliant(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "pliant", *map(str, words)], env=CLEAN, **options
    )


@contextmanager
def served(folder, port=0):
    """Serve a folder and yield the page's address; a server that is late fails the test."""
    process = pliant("dash", folder, "--port", port, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        process.stdout.close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chrome") / "profile"
    folder.mkdir()
    with browser(folder) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("served") / "runs"
    for number, method in enumerate(("fedavg", "heterofl", "distreal")):
        write_run(runs / f"method={method},seed={number}", 3 + number, method={"type": method})
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as found:
        yield found


@pytest.fixture
def page(chrome, address):
    opened = chrome.open(address)
    opened.until("document.querySelectorAll('#chart .curve').length === 3")
    yield opened
    assert opened.faults() == []
    assert all(url.startswith((address, "data:")) for url in opened.addresses())
    opened.close()


def count(page, selector):
    return page.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(page, selector):
    return page.run(f"document.querySelector({json.dumps(selector)}).textContent")


def middle(page, expression):
    code = f"(() => {{ const b = {expression}.getBoundingClientRect();"
    return page.run(f"{code} return [b.left + b.width / 2, b.top + b.height / 2] }})()")


def test_the_page_loads_with_runs_curves_devices_and_words(page, tmp_path):
    assert count(page, "#list li") == 3
    assert count(page, "#newest tbody tr") == 3
    page.until("document.querySelector('#lanes-told').textContent.includes('mini-batch')")
    assert "Newest values" in text(page, "#chart-told")
    assert count(page, "#tasks tbody tr") == 6  # three rounds of two devices
    assert text(page, "#command") == "pliant run x.toml"
    assert text(page, "#link-told") == "live"
    page.picture(tmp_path / "light.png")


def test_ticking_two_runs_compares_them_and_is_remembered(page):
    page.click("#untick")
    page.until("document.querySelectorAll('#chart .curve').length === 0")
    for number in (1, 3):
        page.click(f"#list li:nth-child({number}) input")
    page.until("document.querySelectorAll('#chart .curve').length === 2")
    assert count(page, "#newest tbody tr") == 2
    curves = "[...document.querySelectorAll('#chart .curve')]"
    dashes = page.run(f"{curves}.map(c => c.getAttribute('stroke-dasharray'))")
    assert len(set(dashes)) == 2  # also without colour
    page.call("Page.reload")
    page.until("document.querySelectorAll('#newest tbody tr').length === 2")
    assert count(page, "#list input:checked") == 2


def test_other_axes_can_be_chosen(page):
    page.run(
        "(() => { const x = document.querySelector('#x'); x.value = 'bytes'; x.onchange() })()"
    )
    page.until(
        "[...document.querySelectorAll('#chart text')].some(t => t.textContent === 'bytes sent')"
    )


def test_hovering_names_the_point_and_the_mini_batch(page, tmp_path):
    page.hover(*middle(page, "document.querySelector('#chart .mark')"))
    page.until("!document.querySelector('#tip').hidden")
    assert re.search(r"test accuracy: \d+\.\d\d %\nround \d", text(page, "#tip"))
    page.picture(tmp_path / "hover.png")
    page.until("document.querySelectorAll('#tasks tbody tr').length > 0")
    page.run("document.querySelector('#lanes').scrollIntoView({block: 'center'})")
    box = "document.querySelector('#lanes').getBoundingClientRect()"
    left, top = page.run(f"[{box}.left, {box}.top]")
    page.hover(left + 60, top + 30)
    page.until("document.querySelector('#tip').textContent.includes('mini-batch 1 of 4')")
    page.hover(2, 2)
    page.until("document.querySelector('#tip').hidden")


def test_dark_and_light_follow_the_system_and_the_switch(page, tmp_path):
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.run(ground) == "rgb(243, 245, 247)"
    page.scheme("dark")
    page.until(f"{ground} === 'rgb(17, 22, 27)'")
    page.picture(tmp_path / "dark.png")
    page.click("#theme")
    page.until(f"{ground} === 'rgb(243, 245, 247)'")  # light, though the system is dark
    page.scheme("light")
    page.click("#theme")
    page.until(f"{ground} === 'rgb(17, 22, 27)'")
    page.click("#theme")
    assert text(page, "#theme") == "Theme: system"


def test_a_phone_sees_one_column_and_nothing_sticks_out(page, tmp_path):
    page.resize(360, 740, is_phone=True)
    page.until("document.querySelector('#chart').getBoundingClientRect().width < 350")
    assert page.run("document.documentElement.scrollWidth") <= 360
    below = "document.querySelector('#{}').getBoundingClientRect().top"
    assert page.run(below.format("runs")) < page.run(below.format("curves"))
    page.picture(tmp_path / "phone.png")


def test_runs_are_found_by_their_words(page):
    page.run(
        "(() => { const f = document.querySelector('#filter'); f.value = 'hetero'; f.oninput() })()"
    )
    assert count(page, "#list li") == 1
    assert text(page, "#count") == "1 of 3"


@contextmanager
def _going(out, folder):
    (folder / "small.toml").write_text(SMALL)
    process = pliant("run", folder / "small.toml", "--out", out, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_that_goes_on_is_followed(chrome, folder, address, tmp_path):
    page = chrome.open(address)
    page.until("document.querySelectorAll('#chart .curve').length === 3")
    with _going(folder / "live", tmp_path) as going:
        _follow(page, going, folder / "live")
    page.picture(tmp_path / "live.png")
    assert page.faults() == []
    page.close()


def _follow(page, going, run):
    here = _held(going, run, 1)  # no machine is too fast for the page
    assert here < ROUNDS
    line = "[...document.querySelectorAll('#list li')].find(li => li.textContent.includes('live'))"
    page.until(f"{line} !== undefined")
    page.run(f"{line}.querySelector('input').click()")
    page.run(
        "(() => { const w = document.querySelector('#which'); w.value = 'live'; w.onchange() })()"
    )
    row = (
        "[...document.querySelectorAll('#newest tr')].find(tr => tr.textContent.startsWith('live'))"
    )
    shown = f"Number(({row})?.cells[1].textContent ?? 0)"
    page.until(f"{shown} === {here}")
    going.send_signal(signal.SIGCONT)
    here = _held(going, run, here + 1)
    page.until(f"{shown} === {here}")
    going.send_signal(signal.SIGCONT)
    page.until(f"{shown} === {ROUNDS}")
    assert going.wait(60) == 0
    page.until("document.querySelector('#lanes-told').textContent.startsWith('Rounds 6 to 8')")
    page.until(f"{line}.textContent.includes('finished')")


def _held(process, run, rounds):
    """Stop a run when it has written so many rounds, and return how many there are."""
    path = run / "events.jsonl"

    def written():
        return path.read_bytes().count(b'"type":"round"') if path.exists() else 0

    wait(lambda: written() >= rounds, f"round {rounds}", 180)
    process.send_signal(signal.SIGSTOP)
    return written()


def test_the_front_of_a_search_grows(chrome, tmp_path):
    search = tmp_path / "runs" / "search"
    search.mkdir(parents=True)
    (search / "config.json").write_text('{"search": {}, "network": {"name": "digits_cnn"}}')
    trial = '{{"rates": [{0}, {0}], "seed": 1, "accuracy": {1}}}\n'
    (search / "trials.jsonl").write_text(trial.format(0.0, 0.9) + trial.format(0.5, 0.3))
    with served(tmp_path / "runs") as address:
        page = chrome.open(address)
        told = "document.querySelector('#pareto-told').textContent"
        page.until(f"{told}.includes('2 short trainings, 2 vectors on the front')")
        with open(search / "trials.jsonl", "a") as file:
            file.write(trial.format(0.25, 0.7) + trial.format(0.3, 0.6) + trial.format(0.4, 0.2))
        page.until(f"{told}.includes('5 short trainings, 4 vectors on the front')")
        assert count(page, "#pareto .cloud") == 5
        page.picture(tmp_path / "front.png")
        assert page.faults() == []
        page.close()


def test_the_page_outlives_its_server(chrome, tmp_path):
    run = write_run(tmp_path / "runs" / "one", 2)
    with served(tmp_path / "runs") as address:
        page = chrome.open(address)
        page.until("document.querySelectorAll('#newest tbody tr').length === 1")
    page.until("document.querySelector('#link-told').textContent === 'reconnecting'")
    with open(run / "events.jsonl", "ab") as file:
        file.write(lines(2))
    with served(tmp_path / "runs", port=address.strip("/").rpartition(":")[2]):
        page.until("document.querySelector('#link-told').textContent === 'live'")
        page.until("document.querySelector('#newest tbody td:nth-child(2)').textContent === '3'")
        asked = page.run("performance.getEntriesByType('navigation').length")
        assert asked == 1  # nobody has loaded the page again
        page.close()


def test_the_report_is_whole_in_itself(chrome, tmp_path):
    for method in ("fedavg", "distreal"):
        for seed in (0, 1):
            write_run(
                tmp_path / "runs" / f"method={method},seed={seed}",
                4,
                seed=seed,
                method={"type": method},
            )
    done = pliant(
        "report", tmp_path / "runs", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    path = done.communicate(timeout=180)[0].strip()
    assert done.returncode == 0
    page = chrome.open(f"file://{path}")
    page.until("document.readyState === 'complete' && document.images.length > 4")
    assert page.run("[...document.images].every(i => i.naturalWidth > 0 && i.alt.length > 40)")
    assert page.run(
        "[...document.querySelectorAll('figure')].every(f => f.parentNode.querySelector('table'))"
    )
    assert all(url.startswith(("file:", "data:")) for url in page.addresses())
    page.picture(tmp_path / "report.png", whole=True)
    page.scheme("dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"
    page.resize(360, 740, is_phone=True)
    time.sleep(0.2)
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.faults() == []
    page.close()
