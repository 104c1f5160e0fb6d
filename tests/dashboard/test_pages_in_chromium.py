"""The dashboard and the report in a real Chromium, as a user sees them."""

import json
import re
import signal
import subprocess
from contextlib import contextmanager

import pytest
from tests.dashboard.chromium import count, find_browser, get_centre, get_text, serve, set_choice
from tests.dashboard.written_runs import make_lines, write_run
from tests.suspended import start_suspended, wait_until_suspended
from tests.waiting import LIMIT, wait_until

from pliant.analysis.style import TEXT_COLOUR
from pliant.report.build import write_report
from pliant.report.dark import DARK_COLOURS, GROUND

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(find_browser() is None, reason="install Chromium to test the pages"),
]
ROUNDS = 8
EXPERIMENT = f"""
rounds = {ROUNDS}
per_round = 3
workers = {{ type = "inline" }}
method = {{ type = "distreal", local = {{ batch = 64 }} }}
fleet = {{ size = 8, speed = {{ type = "changing", low = 0.3333, high = 1.0, per_round = 2.0 }} }}
rules = {{ late = "partial" }}
data = {{ proxy = 7400 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("served") / "runs"
    for number, method in enumerate(("fedavg", "heterofl", "distreal")):
        write_run(runs / f"method={method},seed={number}", 3 + number, method={"type": method})
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with serve(folder) as address:
        yield address


@pytest.fixture
def page(browser, address):
    page = browser.open(address)
    page.until("document.querySelectorAll('#chart .curve').length === 3")
    yield page
    assert page.get_errors() == []
    assert all(url.startswith((address, "data:")) for url in page.get_requested_urls())
    page.close()


def test_the_page_shows_runs_curves_devices_and_texts(page, tmp_path):
    assert count(page, "#list li") == 3
    assert count(page, "#newest tbody tr") == 3
    page.until("document.querySelector('#lanes-text').textContent.includes('mini-batch')")
    assert "Newest values" in get_text(page, "#chart-text")
    assert count(page, "#tasks tbody tr") == 6  # three rounds of two devices
    assert get_text(page, "#tasks tbody td:nth-child(3)") == "finished"
    assert get_text(page, "#command") == "pliant run x.toml"
    assert get_text(page, "#connection-text") == "live"
    page.save_screenshot(tmp_path / "light.png")


def test_selecting_two_runs_compares_them_and_survives_a_reload(page):
    page.click("#deselect")
    page.until("document.querySelectorAll('#chart .curve').length === 0")
    for number in (1, 3):
        page.click(f"#list li:nth-child({number}) input")
    page.until("document.querySelectorAll('#chart .curve').length === 2")
    assert count(page, "#newest tbody tr") == 2
    curves = "[...document.querySelectorAll('#chart .curve')]"
    dashes = page.run(f"{curves}.map(c => c.getAttribute('stroke-dasharray'))")
    assert len(set(dashes)) == 2  # distinct without colour
    page.call("Page.reload")
    page.until("document.querySelectorAll('#newest tbody tr').length === 2")
    assert count(page, "#list input:checked") == 2


def test_other_axes_can_be_selected(page):
    page.run(
        "(() => { const x = document.querySelector('#x'); x.value = 'bytes'; x.onchange() })()"
    )
    page.until(
        "[...document.querySelectorAll('#chart text')].some(t => t.textContent === 'bytes sent')"
    )


def test_hovering_names_the_point_and_the_mini_batch(page, tmp_path):
    page.hover(*get_centre(page, "document.querySelector('#chart .mark')"))
    page.until("!document.querySelector('#tip').hidden")
    assert re.search(r"test accuracy: \d+\.\d\d %\nround \d", get_text(page, "#tip"))
    page.save_screenshot(tmp_path / "hover.png")
    page.until("document.querySelectorAll('#tasks tbody tr').length > 0")
    page.run("document.querySelector('#lanes').scrollIntoView({block: 'center'})")
    box = "document.querySelector('#lanes').getBoundingClientRect()"
    left, top = page.run(f"[{box}.left, {box}.top]")
    page.hover(left + 60, top + 30)
    page.until("document.querySelector('#tip').textContent.includes('mini-batch 1 of 4')")
    page.hover(2, 2)
    page.until("document.querySelector('#tip').hidden")


def test_the_side_of_scaled_images_is_shown(browser, tmp_path):
    path = write_run(tmp_path / "runs" / "progressive", 3) / "events.jsonl"
    first, second, rest = path.read_text().split('"side":null', 2)
    path.write_text(f'{first}"side":16{second}"side":24{rest}')
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        page.until("document.querySelectorAll('#chart .curve').length === 1")
        page.run(
            "(() => { const y = document.querySelector('#y'); y.value = 'side'; y.onchange() })()"
        )
        page.until("document.querySelector('#chart-text').textContent.includes('Newest values')")
        page.until("document.querySelector('#chart-text').textContent.includes(': 24')")
        page.until("document.querySelectorAll('#tasks tbody tr').length === 6")
        page.hover(*get_centre(page, "document.querySelector('#chart .mark')"))
        page.until("document.querySelector('#tip').textContent.includes(', 16x16 pixels')")
        page.save_screenshot(tmp_path / "sides.png")
        assert page.get_errors() == []
        page.close()


def test_runs_without_rounds_share_an_axis_of_seconds(browser, tmp_path):
    path = write_run(tmp_path / "runs" / "fedbuff", 3) / "events.jsonl"
    text = path.read_text().replace('"staleness":null', '"staleness":2')
    path.write_text(text.replace('"sent_at":null', '"sent_at":0.1'))
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        description = "document.querySelector('#chart-text').textContent"
        page.until(f"{description}.startsWith('Line chart of test accuracy against seconds')")
        assert get_text(page, "#unit") == "versions"
        page.hover(*get_centre(page, "document.querySelector('#chart .mark')"))
        page.until("document.querySelector('#tip').textContent.includes('version ')")
        page.until("document.querySelector('#task-unit').textContent === 'version'")
        page.save_screenshot(tmp_path / "versions.png")
        write_run(tmp_path / "runs" / "fedavg", 4, method={"type": "fedavg"})
        page.call("Page.reload")
        page.until("document.querySelectorAll('#list input').length === 2")
        page.click("#list li:not(:has(input:checked)) input")
        page.until("document.querySelectorAll('#chart .curve').length === 2")
        set_choice(page, "x", "round")
        page.until(f"{description}.includes('against rounds or versions')")
        set_choice(page, "y", "staleness")
        page.until(f"{description}.includes('fedbuff: 2')")
        page.save_screenshot(tmp_path / "both.png")
        assert page.get_errors() == []
        page.close()


def test_the_theme_follows_the_system_and_the_button(page, tmp_path):
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.run(ground) == "rgb(243, 245, 247)"
    page.set_scheme("dark")
    page.until(f"{ground} === 'rgb(17, 22, 27)'")
    page.save_screenshot(tmp_path / "dark.png")
    page.click("#theme")
    page.until(f"{ground} === 'rgb(243, 245, 247)'")  # light, though the system is dark
    page.set_scheme("light")
    page.click("#theme")
    page.until(f"{ground} === 'rgb(17, 22, 27)'")
    page.click("#theme")
    assert get_text(page, "#theme") == "Theme: system"


def test_a_phone_shows_one_column_without_overflow(page, tmp_path):
    page.resize(360, 740, is_phone=True)
    page.until("document.querySelector('#chart').getBoundingClientRect().width < 350")
    assert page.run("document.documentElement.scrollWidth") <= 360
    top = "document.querySelector('#{}').getBoundingClientRect().top"
    assert page.run(top.format("runs")) < page.run(top.format("curves"))
    page.save_screenshot(tmp_path / "phone.png")


def test_the_list_can_be_filtered(page):
    page.run(
        "(() => { const f = document.querySelector('#filter'); f.value = 'hetero'; f.oninput() })()"
    )
    assert count(page, "#list li") == 1
    assert get_text(page, "#count") == "1 of 3"


@contextmanager
def start_run(out, folder, rounds):
    """Start a run that suspends itself before these rounds."""
    (folder / "small.toml").write_text(EXPERIMENT)
    words = ["run", folder / "small.toml", "--out", out]
    process = start_suspended(rounds, *words, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_active_run_is_followed(browser, folder, address, tmp_path):
    page = browser.open(address)
    page.until("document.querySelectorAll('#chart .curve').length === 3")
    with start_run(folder / "live", tmp_path, rounds=[1, 4]) as process:
        follow_run(page, process)
    page.save_screenshot(tmp_path / "live.png")
    assert page.get_errors() == []
    page.close()


def follow_run(page, process):
    wait_until_suspended(process)
    item = "[...document.querySelectorAll('#list li')].find(li => li.textContent.includes('live'))"
    page.until(f"{item} !== undefined")
    page.run(f"{item}.querySelector('input').click()")
    choice = "document.querySelector('#run-choice')"
    page.run(f"(() => {{ const c = {choice}; c.value = 'live'; c.onchange() }})()")
    row = (
        "[...document.querySelectorAll('#newest tr')].find(tr => tr.textContent.startsWith('live'))"
    )
    rounds_on_page = f"Number(({row})?.cells[1].textContent ?? 0)"
    page.until(f"{rounds_on_page} === 1")
    process.send_signal(signal.SIGCONT)
    page.until(f"{rounds_on_page} === 4")
    wait_until_suspended(process)
    process.send_signal(signal.SIGCONT)
    page.until(f"{rounds_on_page} === {ROUNDS}")
    assert process.wait(LIMIT) == 0
    page.until("document.querySelector('#lanes-text').textContent.startsWith('Rounds 6 to 8')")
    page.until(f"{item}.textContent.includes('finished')")


def test_the_front_of_a_search_grows(browser, tmp_path):
    search = tmp_path / "runs" / "search"
    search.mkdir(parents=True)
    config = {"format": 2, "search": {}, "network": {"name": "digits_cnn"}}
    (search / "config.json").write_text(json.dumps(config))
    trial = '{{"rates": [{0}, {0}], "seed": 1, "accuracy": {1}}}\n'
    (search / "trials.jsonl").write_text(trial.format(0.0, 0.9) + trial.format(0.5, 0.3))
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        text = "document.querySelector('#pareto-text').textContent"
        page.until(f"{text}.includes('2 short trainings, 2 vectors on the front')")
        with open(search / "trials.jsonl", "a") as file:
            file.write(trial.format(0.25, 0.7) + trial.format(0.3, 0.6) + trial.format(0.4, 0.2))
        page.until(f"{text}.includes('5 short trainings, 4 vectors on the front')")
        assert count(page, "#pareto .cloud") == 5
        page.save_screenshot(tmp_path / "front.png")
        assert page.get_errors() == []
        page.close()


def test_the_page_survives_a_server_restart(browser, tmp_path):
    run = write_run(tmp_path / "runs" / "one", 2)
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        page.until("document.querySelectorAll('#newest tbody tr').length === 1")
    page.until("document.querySelector('#connection-text').textContent === 'reconnecting'")
    with open(run / "events.jsonl", "ab") as file:
        file.write(make_lines(2))
    with serve(tmp_path / "runs", port=address.strip("/").rpartition(":")[2]):
        page.until("document.querySelector('#connection-text').textContent === 'live'")
        page.until("document.querySelector('#newest tbody td:nth-child(2)').textContent === '3'")
        page_loads = page.run("performance.getEntriesByType('navigation').length")
        assert page_loads == 1
        page.close()


@pytest.fixture(scope="module")
def report_page(tmp_path_factory):
    """Return the page of a report on federated and split methods, which have no data in common."""
    runs = tmp_path_factory.mktemp("reported") / "runs"
    methods = {"fedavg": "digits", "distreal": "digits", "split": "other", "splitfed": "other"}
    for method, data in methods.items():
        for seed in (0, 1):
            about = {"seed": seed, "method": {"type": method}, "data": {"name": data}}
            write_run(runs / f"method={method},seed={seed}", lower=0.1 * seed, **about)
    return write_report([runs], runs.parent / "report", target=0.6)


def test_the_report_is_self_contained_short_and_fits_a_phone(browser, report_page, tmp_path):
    page = browser.open(f"file://{report_page}")
    page.until("document.readyState === 'complete' && document.images.length > 4")
    images = "[...document.images]"
    assert page.run(f"{images}.every(i => i.naturalWidth > 0 && i.alt.length > 40)")
    assert page.run(
        "[...document.querySelectorAll('figure')].every(f => f.parentNode.querySelector('table'))"
    )
    assert all(url.startswith(("file:", "data:")) for url in page.get_requested_urls())
    assert page.run("document.documentElement.scrollHeight") < 4 * 900  # details are folded
    opened = "[...document.querySelectorAll('section[id]')].map(s => s.id)"
    assert page.run(opened) == [
        "summary",
        "accuracy-seconds",
        "time-to-target",
        "trade-off-federated",
    ]
    page.save_screenshot(tmp_path / "report.png", is_full_page=True)
    page.run("location.hash = 'config'")
    page.until("document.querySelector('#config').closest('details').open")
    wide = page.run(f"{images}.map(i => i.naturalWidth)")
    page.resize(390, 844, is_phone=True)
    page.until("document.documentElement.scrollWidth <= 390")
    page.until(
        f"{images}.every(i => i.naturalWidth === 336)"
    )  # 3.5 inches, at which text is readable
    assert min(wide) > 800
    assert page.get_errors() == []
    page.close()


def test_figures_of_the_report_are_dark_on_a_dark_page(browser, report_page, tmp_path):
    image = pytest.importorskip("PIL.Image")
    page = browser.open(f"file://{report_page}", scheme="dark")
    page.until("document.readyState === 'complete' && document.images.length > 4")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"
    page.run("document.querySelector('figure img').scrollIntoView({block: 'center'})")
    box = "document.querySelector('figure img').getBoundingClientRect()"
    left, top, width, height = map(
        round, page.run(f"[{box}.left, {box}.top, {box}.width, {box}.height]")
    )
    path = tmp_path / "dark.png"

    def count_colours():
        page.save_screenshot(path)
        figure = image.open(path).convert("RGB").crop((left, top, left + width, top + height))
        return {colour: number for number, colour in figure.getcolors(1 << 20)}

    ground = tuple(bytes.fromhex(GROUND[1:]))
    wait_until(lambda: count_colours().get(ground, 0) > 0.5 * width * height, "a dark figure")
    colours = count_colours()
    assert colours.get((255, 255, 255), 0) == 0
    assert colours.get(tuple(bytes.fromhex(DARK_COLOURS[TEXT_COLOUR][1:])), 0) > 100  # text
    page.close()
