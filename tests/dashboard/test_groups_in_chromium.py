"""The list of the dashboard and its curves: comparisons, seeds, names, links, shades, phones."""

import json
import shutil
from statistics import stdev

import pytest
from tests.dashboard.chromium import (
    count,
    find_browser,
    get_text,
    get_texts,
    serve,
    set_choice,
)
from tests.dashboard.written_runs import write_run

from pliant.nn.pareto_table import ParetoTable
from pliant.nn.table_file import save_table

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(find_browser() is None, reason="install Chromium to test the pages"),
]
LAST = 1 - 0.9 / 4  # accuracy of the fourth round
DESCRIPTION = "document.querySelector('#chart-text').textContent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("grouped") / "runs"
    for seed in range(3):
        name = f"method=fedavg,seed={seed}"
        write_run(runs / "sweep" / name, lower=0.1 * seed, seed=seed, method={"type": "fedavg"})
    for seed in range(2):  # the second one is not finished
        name = f"method=distreal,seed={seed}"
        write_run(runs / "sweep" / name, 4 - 2 * seed, lower=0.05, seed=seed)
    later = {"method": {"type": "fedavg"}, "rounds": 8}
    write_run(runs / "later" / "method=fedavg,seed=0", 8, lower=0.3, **later)
    write_search(runs / "found")
    return runs


def write_search(folder):
    """Write a finished search with three vectors of equal rates."""
    folder.mkdir()
    config = {"format": 2, "search": {}, "network": {"name": "digits_cnn"}}
    (folder / "config.json").write_text(json.dumps(config))
    trials = [((0.0, 0.0), 0.9), ((0.25, 0.25), 0.6), ((0.5, 0.5), 0.3), ((0.1, 0.4), 0.7)]
    lines = [
        json.dumps({"rates": rates, "accuracy": value, "cost": 1 - sum(rates) / 2})
        for rates, value in trials
    ]
    (folder / "trials.jsonl").write_text("\n".join(lines) + "\n")
    save_table(folder / "table.safetensors", ParetoTable("net", ((0.0, 0.0),), (1.0,), (0.1,)))


@pytest.fixture(scope="module")
def address(folder):
    with serve(folder) as address:
        yield address


@pytest.fixture
def page(browser, address):
    page = browser.open(f"{address}#sweep")
    for row in ("distreal (2 seeds)", "fedavg (3 seeds)"):  # runs come one by one
        page.until(f"document.querySelector('#newest tbody').textContent.includes('{row}')")
    yield page
    # the page may ask for a run that is being deleted
    assert [error for error in page.get_errors() if "short%2Fgone" not in error] == []
    page.close()


def read_groups(page):
    """Return the list as text: comparisons, and the groups below each."""
    listed = {}
    lines = page.run(
        "[...document.querySelector('#list').children].map(li => [li.className, "
        "li.querySelector('.fold, .name').textContent])"
    )
    for kind, name in lines:
        if kind == "comparison":
            members = listed.setdefault(name, [])
        else:
            members.append(name)
    return listed


def test_runs_are_grouped_by_comparison_and_seed(page, tmp_path):
    set_choice(page, "sort", "name")
    assert list(read_groups(page).items()) == [
        ("single runs", ["found"]),
        ("later", ["fedavg · seed 0"]),
        ("sweep", ["distreal", "fedavg"]),
    ]
    spread = 100 * stdev([0.0, 0.1, 0.2])
    assert f"{100 * LAST - 10:.2f} ± {spread:.2f} %" in get_texts(page, "#list .value")
    assert get_texts(page, "#list .seeds summary") == ["2 seeds", "3 seeds"]
    labels = page.run("[...document.querySelectorAll('#chart > text')].map(t => t.textContent)")
    assert [label for label in labels if label.isdecimal()] == ["1", "2", "3", "4"]
    assert "1.5" not in labels  # there is no half round
    page.save_screenshot(tmp_path / "groups.png")


def test_a_line_is_the_mean_over_finished_seeds_with_a_band(page):
    page.until(f"{DESCRIPTION}.includes('fedavg (3 seeds): {100 * LAST - 10:.2f} %')")
    assert count(page, "#chart .band") == 1
    # one finished run of two: both are lines of their own
    assert f"distreal · seed 0: {100 * LAST - 5:.2f} %" in get_text(page, "#chart-text")
    assert count(page, "#chart .curve") == 3
    cells = get_texts(page, "#newest tbody tr:last-child td")
    assert cells[0] == "fedavg (3 seeds)"
    assert cells[5] == f"{100 * LAST - 10:.2f} ± 10.00 %"
    page.click("#seeds")
    page.until("document.querySelectorAll('#chart .curve').length === 5")
    assert count(page, "#chart .band") == 0
    assert count(page, "#newest tbody tr") == 5


def test_a_group_and_a_comparison_are_selected_as_a_whole(page):
    page.click("#deselect")
    page.until("document.querySelectorAll('#chart .curve').length === 0")
    set_choice(page, "sort", "name")
    page.click("#list .group:last-child > label > input")
    newest = "document.querySelector('#newest td')?.textContent.trim()"
    page.until(f"{newest} === 'fedavg (3 seeds)'")  # runs come one by one
    assert page.run("document.querySelectorAll('#newest tbody tr').length") == 1
    headings = "[...document.querySelectorAll('#list .comparison')]"
    box = f"{headings}.find(li => li.textContent.startsWith('sweep')).querySelector('input')"
    assert page.run(f"{box}.indeterminate")
    page.run(f"{box}.click()")
    page.until("document.querySelectorAll('#newest tbody tr').length === 2")
    assert page.run(f"{box}.checked")


def test_names_are_unique(page):
    page.run("location.hash = 'sweep&later'")
    page.until("document.querySelectorAll('#newest tbody tr').length === 3")
    page.click("#seeds")
    page.until("document.querySelectorAll('#newest tbody tr').length === 6")
    names = get_texts(page, "#newest td:first-child")
    assert len(set(names)) == 6
    assert {"later/fedavg · seed 0", "sweep/fedavg · seed 0", "fedavg · seed 1"} <= set(names)
    choices = get_texts(page, "#run-choice option")
    assert len(set(choices)) == len(choices) == 6


def test_search_and_sort(page):
    set_choice(page, "filter", "distreal", "oninput")
    assert read_groups(page) == {"sweep": ["distreal"]}
    assert get_text(page, "#count") == "2 of 7"
    set_choice(page, "filter", "", "oninput")
    set_choice(page, "sort", "accuracy")
    # means of the last accuracies: sweep's fedavg 67.5, distreal 61.25 (72.5 and 50), later 58.75
    assert list(read_groups(page)) == ["sweep", "later", "single runs"]
    assert read_groups(page)["sweep"] == ["fedavg", "distreal"]


def test_smoothing_averages_the_newest_values(page):
    page.run("location.hash = 'later'")
    page.until("document.querySelectorAll('#newest tbody tr').length === 1")
    set_choice(page, "smooth", "2", "oninput")
    mean = 100 * (1 - 0.9 * (1 / 7 + 1 / 8) / 2 - 0.3)
    page.until(f"{DESCRIPTION}.includes('fedavg · seed 0: {mean:.2f} %')")


def test_the_full_network_is_the_darkest_and_the_legend_says_so(page):
    page.until("document.querySelectorAll('#tasks tbody tr').length > 0")
    assert get_text(page, "#shade-low") == "row 0, the cheapest step"
    assert get_text(page, "#shade-high") == "row 3, the largest here"
    for scheme in ("light", "dark"):
        page.set_scheme(scheme)
        page.until(
            "matchMedia('(prefers-color-scheme: dark)').matches === "
            + str(scheme == "dark").lower()
        )
        shades = page.run(
            "import('./timeline.js').then(({shade}) => [0, 0.25, 0.5, 0.75, 1].map(shade))"
        )
        sums = [sum(map(int, shade[4:-1].split(","))) for shade in shades]
        assert sums == sorted(sums, reverse=True)
        assert sums[-1] < 200 < 500 < sums[0]
    levels = "[[0, 3], [3, 3], [undefined, 3], [0, 0], [undefined, -1]].map(a => getLevel(...a))"
    assert page.run(f"import('./timeline.js').then(({{getLevel}}) => {levels})") == [0, 1, 1, 1, 1]
    legend = page.run("getComputedStyle(document.querySelector('#shades')).backgroundImage")
    assert legend.index("245, 225, 90") < legend.index("20, 52, 108")  # as in the bars


def test_a_finished_search_is_shown_as_finished_beside_equal_rates(page, tmp_path):
    page.run("location.hash = 'found'")
    page.until("document.querySelectorAll('#pareto .curve').length === 2")
    assert get_text(page, "#list .on .more").startswith("finished")
    assert "3 vectors with equal rates for all sites" in get_text(page, "#pareto-text")
    page.save_screenshot(tmp_path / "search.png")
    page.resize(390, 844, is_phone=True)
    page.until("document.querySelector('#pareto').getBoundingClientRect().width < 390")
    cut_off = page.run(
        "[...document.querySelectorAll('#pareto text')].filter(t => { const b = "
        "t.getBoundingClientRect(); return b.left < 0 || b.right > 390 }).map(t => t.textContent)"
    )
    assert cut_off == []


def test_a_deleted_run_disappears(page, folder):
    write_run(folder / "short" / "gone")
    page.until("document.querySelector('#list').textContent.includes('gone')")
    page.run("location.hash = 'short'")
    page.until("document.querySelectorAll('#chart .curve').length === 1")
    shutil.rmtree(folder / "short")
    page.until("!document.querySelector('#list').textContent.includes('gone')")
    page.until("document.querySelectorAll('#chart .curve').length === 0")
    assert not page.run("document.querySelector('#chart-empty').hidden")


def test_a_link_selects_a_run_or_a_folder_in_an_open_page(page):
    page.run("location.hash = 'later/method%3Dfedavg%2Cseed%3D0'")
    page.until("document.querySelectorAll('#newest tbody tr').length === 1")
    assert count(page, "#list .group .on") == 1
    page.run("location.hash = 'sweep'")
    page.until("document.querySelectorAll('#newest tbody tr').length === 2")
    assert page.run("location.hash").count("&") == 4  # of five runs


def test_hovering_anywhere_names_the_nearest_curve(page):
    box = "document.querySelector('#chart').getBoundingClientRect()"
    left, top, width, height = page.run(f"[{box}.left, {box}.top, {box}.width, {box}.height]")
    names = set()
    for x, y in ((0.02, 0.02), (0.98, 0.02), (0.02, 0.98), (0.98, 0.98), (0.5, 0.5)):
        page.hover(left + x * width, top + y * height)
        page.until("!document.querySelector('#tip').hidden")
        names.add(get_text(page, "#tip").splitlines()[0])
        assert count(page, "#chart .strong") == 1
    assert len(names) > 1
    set_choice(page, "smooth", "2", "oninput")  # a new drawing under a pointer at rest
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert count(page, "#chart .strong") == 1
    # between two points of a long stretch, where the point of another curve is nearer
    nearest = (
        "import('./chart.js').then(({findNearest}) => {"
        "const curve = (label, ...xy) => ({ label, series: {}, "
        "points: xy.map(([x, y], index) => ({ x, y, index })) });"
        "const found = findNearest("
        "[curve('long', [0, 0], [100, 0]), curve('short', [50, 30], [50, 40])], 45, 10);"
        "return [found.curve.label, found.point.index] })"
    )
    assert page.run(nearest) == ["long", 0]


def test_no_column_is_cut_off_on_a_phone(page, tmp_path):
    page.resize(390, 844, is_phone=True)
    page.until("document.querySelector('#chart').getBoundingClientRect().width < 390")
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.run("document.querySelector('#tasks').closest('details').open = true")
    cut_off = page.run(
        "[...document.querySelectorAll('#newest td, #tasks td, #list .name, #list .value')]"
        ".filter(e => { const b = e.getBoundingClientRect();"
        " return b.left < 0 || b.right > 390 || e.scrollWidth > e.clientWidth + 1 })"
        ".map(e => e.textContent)"
    )
    assert cut_off == []
    labels = page.run(
        "[...document.querySelector('#newest tbody tr').cells].map(c => c.dataset.label ?? '')"
    )
    assert labels == ["", "rounds", "seconds", "MACs", "bytes", "accuracy", "loss", "used"]
    page.save_screenshot(tmp_path / "phone.png", is_full_page=True)
    page.set_scheme("dark")
    page.save_screenshot(tmp_path / "phone-dark.png", is_full_page=True)


def test_the_axis_zooms_on_the_finish(page):
    page.run("location.hash = 'later'")
    page.until("document.querySelectorAll('#newest tbody tr').length === 1")
    lowest = "Math.min(...[...document.querySelectorAll('#chart text')].map(t => "
    lowest += "t.textContent.endsWith(' %') ? parseFloat(t.textContent) : 100))"
    page.until(f"{lowest} < 0")  # where the curve begins
    page.click("#zoom")
    page.until(f"{lowest} > 10")
