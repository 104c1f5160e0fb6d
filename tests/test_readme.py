"""The numbers in the README's tables were measured: each is in a CSV with the place it is from."""

import csv
import re
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.]*\w)")  # not in names such as CIFAR-10
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code, and the targets of links
WORDS = {"three": 3.0}


def read_csv(name):
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def list_numbers_in_tables(text):
    rows = [NOT_PROSE.sub("", line) for line in text.splitlines() if line.startswith("|")]
    return [number for row in rows for number in NUMBER.findall(row)]


def test_every_number_in_the_readmes_tables_is_in_the_csv():
    numbers = list_numbers_in_tables((ROOT / "README.md").read_text())
    known = {row["number"] for row in read_csv("readme.csv")}
    assert set(numbers) == known


def test_every_number_of_the_csv_is_on_its_page():
    for row in read_csv("readme.csv"):
        assert row["quote"] in (RESULTS / row["page"]).read_text(), row
        quoted = [float(number) for number in NUMBER.findall(row["quote"])]
        quoted += [WORDS[word] for word in row["quote"].split() if word in WORDS]
        decimals = len(row["number"].partition(".")[2])
        assert float(row["number"]) in [round(number, decimals) for number in quoted], row


def test_the_race_ends_as_its_records_say():
    numbers = {row["what"]: row["number"] for row in read_csv("readme.csv")}
    accuracies = {}  # by method and seed
    for row in read_csv("progressive_cifar10_nesterov.csv"):
        key = row["method"], row["seed"]
        accuracies.setdefault(key, []).append(float(row["trained_accuracy"]))
    ends = {
        method: 100 * fmean(fmean(a[-5:]) for (name, _), a in accuracies.items() if name == method)
        for method, _ in accuracies
    }
    progressive = ends.pop("progressive")
    assert f"{progressive:.1f}" == numbers["progressive training at the end, per cent"]
    assert f"{max(ends.values()):.1f}" == numbers["the best rival at the end, per cent"]
