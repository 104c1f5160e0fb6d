"""Build a report: read the runs, draw the figures, write the page and the files beside it."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, count
from math import isnan
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from pliant.analysis import pareto_plot, summary_csv
from pliant.analysis.curves import AXES, draw_learning_curves
from pliant.analysis.data_overview import draw_class_counts, load_data_overview
from pliant.analysis.runs import (
    COLUMNS,
    RunGroup,
    flatten_config,
    get_config_value,
    group_comparable,
    group_runs,
    load_runs,
    select_finished,
)
from pliant.analysis.style import MISSING, ReportFigure, format_csv
from pliant.analysis.summary import format_summary, get_budgets, summarise_groups
from pliant.analysis.time_to_target import draw_time_to_target
from pliant.analysis.timeline import draw_timeline, load_tasks
from pliant.analysis.tradeoff import draw_tradeoff
from pliant.analysis.utilisation import draw_utilisation
from pliant.report.page import (
    Section,
    fold_section,
    make_figure_section,
    make_section,
    render_page,
    render_table,
)

PAGE_FILE = "index.html"
MAX_TIMELINES = 8
TIMELINE_ROUNDS = 3  # per timeline
MAX_CLASS_FIGURES = 4
# Figures that the page shows at once, by the start of their names; others are folded.
OPEN_FIGURES = ("accuracy-seconds", "time-to-target", "trade-off", "pareto")
OPEN_HEIGHT = 15.0  # inches of open figures: with table and titles less than four screens

ProgressFn = Callable[[str, int, int], object]  # next step, steps done, steps in all


@dataclass(frozen=True, eq=False)
class _ReportData:
    groups: list[RunGroup]
    finished: list[RunGroup]  # without runs that have no round yet
    tables: list[pareto_plot.RateVectors]
    target: float
    start_step: Callable[[str], None]


def _count_steps(on_progress: ProgressFn, estimate: int) -> Callable[[str], None]:
    """Return a function that reports the next step; the number of figures is only estimated."""
    numbers = count()

    def start_step(text: str) -> None:
        done = next(numbers)
        on_progress(text, done, max(estimate, done + 1))

    return start_step


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    target: float = 0.9,
    command: str = "",
    on_progress: ProgressFn = lambda text, done, total: None,
) -> Path:
    """Write the report of all runs in some folders and return its page.

    All files are written to a temporary folder first, so that a failure leaves no partial report.
    """
    groups = group_runs(load_runs(paths))
    # 4: reading, trade-off, front, utilisation
    estimate = len(AXES) + 4 + 2 * min(len(groups), MAX_TIMELINES)
    start_step = _count_steps(on_progress, estimate)
    tables = pareto_plot.load_rate_vectors(paths, groups)
    finished = select_finished(groups)
    if not finished and not tables:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: expected a finished round or a table, found neither")
    runs = sum(len(group.runs) for group in groups)
    start_step(f"reading {runs} run{'s' * (runs != 1)}")
    data = _ReportData(groups, finished, tables, target, start_step)
    title = _make_title(paths, finished)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        _write_files(data, temporary, title, command)
        out.mkdir(parents=True, exist_ok=True)
        # the page last, so that it never links to a missing file
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == PAGE_FILE):
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out / PAGE_FILE


def _make_title(paths: Sequence[Path], groups: Sequence[RunGroup]) -> str:
    """Return the names of the folders and what the experiment trained, where all runs agree."""
    names = ", ".join(path.resolve().name for path in paths[:4]) + " …" * (len(paths) > 4)
    facts = []
    for form, keys in (("{}", ("network", "name")), ("{}", ("data", "name")),
                       ("{} devices", ("fleet", "size"))):  # fmt: skip
        values = {get_config_value(group.first_run.config, *keys) for group in groups}
        if len(values) == 1 and (value := values.pop()) is not None:
            facts.append(form.format(Path(str(value)).name))
    return f"{names}: {', '.join(facts)}" if facts else names


def _write_files(data: _ReportData, folder: Path, title: str, command: str) -> None:
    sections: list[Section] = []
    if data.finished:
        sections.append(_write_summary(data, folder))
    height_left = OPEN_HEIGHT
    for figure in filter(None, _draw_figures(data)):
        data.start_step(f"drawing {figure.title}")
        height = float(figure.figure.get_size_inches()[1])
        svg = figure.render("svg")
        (folder / f"{figure.slug}.svg").write_bytes(svg)
        (folder / f"{figure.slug}.png").write_bytes(figure.render("png"))
        column = figure.render_column()
        (folder / f"{figure.slug}.pdf").write_bytes(column["pdf"])
        (folder / f"{figure.slug}-column.svg").write_bytes(column["svg"])
        (folder / f"{figure.slug}.csv").write_text(format_csv(figure.header, figure.rows))
        section = make_figure_section(figure, svg, column["svg"])
        is_open = figure.slug.startswith(OPEN_FIGURES) and height <= height_left
        height_left -= height if is_open else 0.0
        sections.append(section if is_open else fold_section(section))
    if data.finished:
        sections.append(fold_section(_make_outcomes_section(data)))
        sections.append(fold_section(_make_config_section(data)))
        sections.append(fold_section(_make_provenance_section(data)))
    (folder / "rounds.csv").write_text(_format_rounds(data))
    runs = sum(len(group.runs) for group in data.groups)
    description = f"{len(data.tables)} tables of rate vectors."
    if runs:
        groups = len(data.groups)
        description = f"{runs} runs in {groups} groups; runs of a group differ only in their seed."
    footer = f"Made by: {command}" if command else "Made by pliant.report"
    page = render_page(title, description, sections, footer)
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")


def _write_summary(data: _ReportData, folder: Path) -> Section:
    comparable = group_comparable(data.finished)
    parts = [summarise_groups(groups, data.target) for groups in comparable.values()]
    header, rows = format_summary(list(chain(*parts)), data.target)
    numbers = [
        cells
        for groups, part in zip(comparable.values(), parts, strict=True)
        for cells in summary_csv.list_summary_numbers(groups, part, data.target)
    ]
    (folder / "summary.csv").write_text(format_csv(summary_csv.HEADER, numbers))
    note = (
        "Means over seeds. Used: useful MACs as a share of those the selected devices had. Lost: "
        "share of tasks that were not merged. C3 = accuracy · exp(-(B/Bmax + C/Cmax)/8), where the "
        "budgets are the largest use of any group here: it only ranks groups of the same table. "
        "C3 local: of the accuracy after local training. Images: every visit counts. Budgets: "
    )
    budgets = [get_budgets(part) for part in parts]
    note += "; ".join(f"{size:.1f} MB, {gigamacs:.1f} GMACs" for size, gigamacs in budgets) + "."
    if len(comparable) > 1:
        note += " Federated and split methods used different data: each kind has its own budgets."
    if any(group.first_run.is_asynchronous for group in data.finished):
        note += " The rounds of asynchronous runs are versions of the network: compare seconds."
    body = render_table(header, rows, "Summary")
    files = '<p><a href="summary.csv" download>CSV of these numbers and their spreads</a>, '
    files += '<a href="rounds.csv" download>CSV of all rounds</a></p>'
    more = f"<details><summary>Columns and files</summary><p>{escape(note)}</p>{files}</details>"
    return make_section("summary", "Summary", body + more)


def _format_rounds(data: _ReportData) -> str:
    rows = [
        (run.name, *("" if isnan(value) else f"{value:.10g}" for value in values))
        for group in data.finished
        for run in group.runs
        for values in zip(*run.columns.values(), strict=True)
    ]
    return format_csv(("run", *COLUMNS), rows)


def _draw_figures(data: _ReportData) -> Iterator[ReportFigure | None]:
    """Yield the figures; None where there are no records for one."""
    yield draw_learning_curves(data.finished, "seconds")
    yield draw_time_to_target(data.finished, data.target)
    for name, groups in group_comparable(data.finished).items():
        yield draw_tradeoff(name, groups)
    yield pareto_plot.draw_pareto_front(data.tables)
    for axis in (axis for axis in AXES if axis != "seconds"):
        yield draw_learning_curves(data.finished, axis)
    yield from map(pareto_plot.draw_rate_vectors, data.tables)
    yield draw_utilisation(data.finished)
    yield from _draw_timelines_and_classes(data)


def _draw_timelines_and_classes(data: _ReportData) -> Iterator[ReportFigure | None]:
    """Yield one timeline per group, and the class counts of each partition once."""
    class_figures: list[ReportFigure] = []
    drawn_counts: set[bytes] = set()
    for index, group in enumerate(data.finished[:MAX_TIMELINES]):
        data.start_step(f"rebuilding the data of {group.label}")
        overview = load_data_overview(group.first_run)
        shares = overview.row_shares if overview else None
        run = group.first_run
        tasks = load_tasks(run, 0, TIMELINE_ROUNDS)
        sides = {record.round: record.side for record in run.rounds}
        merges = run["seconds"].tolist() if run.is_asynchronous else ()
        yield draw_timeline(str(index), group.label, tasks, shares, sides, merges)
        if overview and overview.class_counts.tobytes() not in drawn_counts:
            drawn_counts.add(overview.class_counts.tobytes())
            label = "" if index == 0 else f": {group.label}"
            class_figures.append(draw_class_counts(str(index), label, overview))
    yield from class_figures[:MAX_CLASS_FIGURES]


def _make_outcomes_section(data: _ReportData) -> Section:
    counts = [group.outcome_counts for group in data.finished]
    outcomes = sorted({outcome for group_counts in counts for outcome in group_counts})
    rows = [
        (group.label, *(group_counts[outcome] for outcome in outcomes))
        for group, group_counts in zip(data.finished, counts, strict=True)
    ]
    title = "Outcomes of tasks"
    return make_section("outcomes", title, render_table(("group", *outcomes), rows, title))


def _make_config_section(data: _ReportData) -> Section:
    """Show the config of the first run and the differences of the others."""
    configs = [flatten_config(group.first_run.config) for group in data.groups]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({config.get(key, "") for config in configs}) > 1]
    first = data.groups[0].first_run
    text = msgspec.json.format(msgspec.json.encode(first.config), indent=2).decode()
    body = (
        f"<p>The resolved config of {escape(first.name)}:</p>"
        f"<details><summary>config.json</summary><pre>{escape(text)}</pre></details>"
    )
    if differing:
        rows = [
            (group.label, *(config.get(key, MISSING) for key in differing))
            for group, config in zip(data.groups, configs, strict=True)
        ]
        body += "<p>Differences between groups:</p>"
        body += render_table(("group", *differing), rows, "Differences")
    return make_section("config", "Config", body)


def _make_provenance_section(data: _ReportData) -> Section:
    runs = [run for group in data.groups for run in group.runs]
    commands = dict.fromkeys(run.provenance.get("command", "not recorded") for run in runs)
    versions = dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in run.provenance.items() if key != "command")
        for run in runs
    )
    body = "".join(f"<pre>{escape(command)}</pre>" for command in commands)
    body += "".join(f'<p class="faint">{escape(text)}</p>' for text in versions)
    return make_section("provenance", "The commands that made these runs", body)
