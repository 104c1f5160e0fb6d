"""A complete report: a self-contained page and the files beside it."""

import csv
import re
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.curves import draw_learning_curves
from pliant.analysis.pareto_plot import load_rate_vectors
from pliant.analysis.runs import group_runs, load_runs, select_finished
from pliant.analysis.style import format_csv
from pliant.cli import main
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.table_file import save_table
from pliant.report.build import write_report

SHARED = {"network": {"name": "tiny"}, "fleet": {"size": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("report") / "runs"
    for seed in (0, 1):
        write_run(runs / f"method=a,seed={seed}", [0.2, 0.4], late={(0, 7)}, seed=seed, **SHARED)
    write_run(runs / "method=<b>", [0.3, 0.6], method={"type": "<script>"}, **SHARED)
    search = runs / "search"
    table = ParetoTable("net", ((0.5, 0.25), (0.0, 0.0)), (0.3, 1.0), (0.1, 0.2))
    save_table(search / "table.safetensors", table)
    return runs


@pytest.fixture(scope="module")
def page(folder):
    return write_report([folder], folder.parent / "out", target=0.3, command="pliant report <runs>")


class PageReader(HTMLParser):
    """Collect open tags, text alternatives and links."""

    def __init__(self):
        super().__init__()
        self.open, self.alts, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)
        if tag == "img":
            self.alts.append(dict(attrs)["alt"])
        if tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_complete_and_every_figure_has_a_text_alternative(page):
    text = page.read_text()
    reader = PageReader()
    reader.feed(text)
    assert reader.open == []
    # curves, seconds to the target, trade-off, front and vectors, utilisation, two timelines
    assert len(reader.alts) == 4 + 1 + 1 + 2 + 1 + 2
    assert all(len(alt) > 40 for alt in reader.alts)
    for link in reader.links:
        if link.startswith("#"):
            assert f'id="{link[1:]}"' in text
        else:
            assert (page.parent / link).is_file()
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*//', text)


def test_names_are_escaped(page):
    text = page.read_text()
    assert "<script>" not in text
    assert "&lt;b&gt;" in text
    assert "pliant run &lt;x&gt;.toml" in text
    assert "pliant report &lt;runs&gt;" in text


def test_every_figure_has_a_conclusion_and_the_title_says_what_was_trained(page):
    text = page.read_text()
    assert len(re.findall(r"<p><strong>[^<]+\.</strong></p><figure", text)) == 11
    assert "After 2 seconds, &lt;b&gt; has 60.00 %, the most; a follows 20.0 points behind." in text
    assert "&lt;b&gt; reaches 30% first, after 1.0 s; a takes 2.00 times as long." in text
    assert "<h1>runs: tiny, 8 devices</h1>" in text


def test_details_are_folded(page):
    text = page.read_text()
    folded = re.findall(r'<details><summary><h2>[^<]+</h2></summary><div id="([\w-]+)"', text)
    assert {"accuracy-rounds", "utilisation", "timeline-0", "outcomes", "config"} <= set(folded)
    assert not {"summary", "accuracy-seconds", "time-to-target", "trade-off"} & set(folded)


def test_every_figure_has_its_files(page):
    slugs = {path.stem for path in page.parent.glob("*.png")}
    assert {"accuracy-rounds", "accuracy-seconds", "accuracy-macs", "accuracy-bytes"} <= slugs
    assert {"trade-off", "pareto", "utilisation", "timeline-0", "vectors-0"} <= slugs
    for slug in slugs:
        assert (page.parent / f"{slug}.png").read_bytes().startswith(b"\x89PNG")
        xml.etree.ElementTree.parse(page.parent / f"{slug}.svg")
        pdf = (page.parent / f"{slug}.pdf").read_bytes()
        width = float(re.search(rb"/MediaBox \[ *0 0 ([\d.]+) ", pdf)[1])
        assert width == pytest.approx(3.5 * 72, abs=1)  # a column, in points
        column = xml.etree.ElementTree.parse(page.parent / f"{slug}-column.svg").getroot()
        assert column.get("width") == "252pt"
        assert len(list(csv.reader((page.parent / f"{slug}.csv").read_text().splitlines()))) > 1


def read_csv(page, name):
    return list(csv.DictReader((page.parent / name).read_text().splitlines()))


def test_the_csv_files_have_the_numbers_of_the_records(page):
    rows = read_csv(page, "timeline-1.csv")
    late = [row for row in rows if row["end"] == "late"]
    assert [(row["round"], row["device"], row["start"]) for row in late] == [
        ("1", "7", "0.0"),
        ("1", "7", "0.4"),
    ]
    rounds = read_csv(page, "rounds.csv")
    assert len(rounds) == 6
    assert {row["accuracy"] for row in rounds} == {"0.2", "0.4", "0.3", "0.6"}
    curve = read_csv(page, "accuracy-rounds.csv")
    assert {row["accuracy"] for row in curve if row["group"] == "a"} == {"0.2", "0.4"}


def test_the_summary_is_also_there_as_numbers(page):
    rows = {row["group"]: row for row in read_csv(page, "summary.csv")}
    assert (rows["a"]["accuracy"], rows["a"]["accuracy_std"]) == ("0.4", "0")
    assert (rows["<b>"]["accuracy"], rows["<b>"]["accuracy_std"]) == ("0.6", "")
    assert rows["<b>"]["seconds_to_target"] == "1"


def test_the_same_runs_give_the_same_figure(page, folder):
    groups = select_finished(group_runs(load_runs([folder])))
    figure = draw_learning_curves(groups, "rounds")
    assert figure.render("svg") == (page.parent / "accuracy-rounds.svg").read_bytes()
    assert (
        format_csv(figure.header, figure.rows) == (page.parent / "accuracy-rounds.csv").read_text()
    )


def test_a_table_found_twice_is_loaded_once(folder):
    (table,) = load_rate_vectors([folder, folder / "search"], [])
    assert table.rates.tolist() == [[0.5, 0.25], [0.0, 0.0]]
    assert table.gains.tolist() == [0.1, 0.2]


def test_a_search_alone_makes_a_report(folder, tmp_path):
    page = write_report([folder / "search"], tmp_path / "out")
    assert "Pareto front" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Expected at least one folder of runs"),
        (["none"], "expected the folder of a run"),
        (["."], "expected a finished round or a table, found neither"),
        ([".", "--target", "1.5"], "Expected a target accuracy above 0 and up to 1, got 1.5"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_file(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pliant:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []
