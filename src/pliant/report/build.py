"""Build a report: read the runs, draw what they have, write the page and the files beside it."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from pliant.report.curves import AXES, draw_curves
from pliant.report.front import Vectors, draw_front, draw_vectors, load_vectors
from pliant.report.history import Lake, Sample, load_samples, load_tasks
from pliant.report.kinds import shared
from pliant.report.look import NONE, Drawn
from pliant.report.page import figure_part, page, part, table
from pliant.report.runs import Group, flattened, grouped, load_runs
from pliant.report.summary import summarised, table_of
from pliant.report.timeline import draw_timeline
from pliant.report.tradeoff import draw_tradeoff
from pliant.report.use import draw_use
from pliant.report.world import World, draw_classes, load_world

PAGE = "index.html"
TIMELINES = 8  # groups with a timeline of their own
ROUNDS = 3  # of a timeline
WORLDS = 4  # pictures of classes

Part = tuple[str, str, str]
Tell = Callable[[str, int, int], None]  # what comes next, how many steps are done, and of all


@dataclass(frozen=True, eq=False)
class _Found:
    """All that a report is made of."""

    groups: list[Group]
    samples: list[Sample]
    tables: list[Vectors]
    lake: Lake
    target: float
    steps: "_Steps"


class _Steps:
    """How far a report is; what it will draw is known only as it goes, so the total is a guess."""

    def __init__(self, tell: Tell, groups: int) -> None:
        self._tell, self._done = tell, 0
        self._total = len(AXES) + 4 + 2 * min(groups, TIMELINES)  # reading, trade-off, front, use

    def next(self, text: str) -> None:
        """Tell what is done now."""
        self._total = max(self._total, self._done + 1)
        self._tell(text, self._done, self._total)
        self._done += 1


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    target: float = 0.9,
    command: str = "",
    tell: Tell = lambda text, done, total: None,
) -> Path:
    """Write the report of all runs in some folders and return its page.

    Everything is made in a folder of its own first: a report that fails leaves none half-written.
    """
    lake = Lake()
    try:
        groups = grouped(load_runs(paths))
        steps = _Steps(tell, len(groups))
        steps.next(f"reading {sum(len(group.runs) for group in groups)} runs")
        tables = load_vectors(paths, groups)
        found = _Found(groups, load_samples(lake, groups), tables, lake, target, steps)
        if not found.samples and not tables:
            told = ", ".join(map(str, paths))
            raise ValueError(f"{told}: expected a finished round or a table, found neither")
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
        try:
            _write(found, work, _title(paths), command)
            _move(work, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lake.close()
    return out / PAGE


def _title(paths: Sequence[Path]) -> str:
    return ", ".join(path.resolve().name for path in paths[:4]) + (" …" if len(paths) > 4 else "")


def _move(work: Path, out: Path) -> None:
    """Put the files in their place, the page last: it never names what is not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(work.iterdir(), key=lambda path: path.name == PAGE):
        os.replace(path, out / path.name)


def _write(found: _Found, work: Path, title: str, command: str) -> None:
    parts: list[Part] = []
    if found.samples:
        parts.append(_summary(found, work))
    for drawn in _figures(found):
        found.steps.next(f"drawing {drawn.title}")
        picture = drawn.image("svg")
        (work / f"{drawn.slug}.svg").write_bytes(picture)
        (work / f"{drawn.slug}.png").write_bytes(drawn.image("png"))
        (work / f"{drawn.slug}.csv").write_text(drawn.csv())
        parts.append(figure_part(drawn, picture))
    if found.samples:
        parts += [_ends(found), _config(found), _made(found)]
    (work / "rounds.csv").write_text(_rounds(found))
    runs = sum(len(group.runs) for group in found.groups)
    told = f"{runs} runs in {len(found.groups)} groups; runs of a group differ in their seed only."
    told = told if runs else f"{len(found.tables)} tables of rate vectors."
    foot = f"Made by: {command}" if command else "Made by pliant.report"
    (work / PAGE).write_text(page(title, told, parts, foot), encoding="utf-8")


def _summary(found: _Found, work: Path) -> Part:
    shares = shared(found.samples)
    lines = [line for share in shares for line in summarised(share.samples, found.target)]
    head, rows = table_of(lines, found.target)
    drawn = Drawn("summary", "", "", None, head, rows)
    (work / "summary.csv").write_text(drawn.csv())
    note = (
        "Means over seeds. Used: useful MACs over those that the selected devices had. Lost: share "
        "of tasks that were not merged. C3 = accuracy · exp(-(B/Bmax + C/Cmax)/8), with the most "
        "bytes and MACs of any group here as budgets: it ranks the groups of one table only."
    )
    if len(shares) > 1:
        note += " Federated and split methods had other data here: each kind has its own budgets."
    body = table(head, rows, "Summary")
    files = '<p class="faint">Beside this page: <a href="summary.csv" download>CSV</a>, '
    files += '<a href="rounds.csv" download>CSV of all rounds</a></p>'
    return part("summary", "Summary", f'{body}<p class="faint">{escape(note)}</p>{files}')


def _rounds(found: _Found) -> str:
    """Return the rounds of all runs as CSV."""
    histories = [history for sample in found.samples for history in sample.histories]
    names = tuple(histories[0].columns) if histories else ()
    rows = [
        (history.run.name, *("" if isnan(value) else f"{value:.10g}" for value in values))
        for history in histories
        for values in zip(*history.columns.values(), strict=True)
    ]
    return Drawn("rounds", "", "", None, ("run", *names), rows).csv()


def _figures(found: _Found) -> Iterator[Drawn]:
    """Yield the figures that the records have something for."""
    for axis in AXES:
        drawn = draw_curves(found.samples, axis)
        if drawn is not None:
            yield drawn
    for share in shared(found.samples):
        tradeoff = draw_tradeoff(share)
        if tradeoff is not None:
            yield tradeoff
    front = draw_front(found.tables)
    if front is not None:
        yield front
    yield from (draw_vectors(one) for one in found.tables)
    use = draw_use(found.samples)
    if use is not None:
        yield use
    yield from _worlds(found)


def _worlds(found: _Found) -> Iterator[Drawn]:
    """Yield timelines and classes, each world of data once."""
    classes: list[Drawn] = []
    seen: set[bytes] = set()
    for at, sample in enumerate(found.samples[:TIMELINES]):
        found.steps.next(f"rebuilding the data of {sample.label}")
        world = load_world(sample.group.first)
        shares = world.shares if isinstance(world, World) else None
        tasks = load_tasks(found.lake, sample.histories[0], 0, ROUNDS)
        drawn = draw_timeline(str(at), sample.label, tasks, shares)
        if drawn is not None:
            yield drawn
        if isinstance(world, World) and world.counts.tobytes() not in seen:
            seen.add(world.counts.tobytes())
            label = "" if at == 0 else f": {sample.label}"
            classes.append(draw_classes(str(at), label, world))
    yield from classes[:WORLDS]


def _ends(found: _Found) -> Part:
    kinds = sorted({end for s in found.samples for h in s.histories for end in h.ends})
    rows = []
    for sample in found.samples:
        counts = [sum(h.ends.get(kind, 0) for h in sample.histories) for kind in kinds]
        rows.append((sample.label, *counts))
    return part("ends", "How tasks ended", table(("group", *kinds), rows, "How tasks ended"))


def _config(found: _Found) -> Part:
    """Tell what was asked for: the first run in full, the others by what differs."""
    flat = [flattened(group.first.config) for group in found.groups]
    keys = dict.fromkeys(key for one in flat for key in one)
    differing = [key for key in keys if len({one.get(key, "") for one in flat}) > 1]
    first = found.groups[0].first
    text = msgspec.json.format(msgspec.json.encode(first.config), indent=2).decode()
    body = (
        f"<p>{escape(first.name)}, resolved as it ran:</p>"
        f"<details><summary>config.json</summary><pre>{escape(text)}</pre></details>"
    )
    if differing:
        rows = [
            (group.label, *(one.get(key, NONE) for key in differing))
            for group, one in zip(found.groups, flat, strict=True)
        ]
        body += "<p>What differs between groups:</p>" + table(
            ("group", *differing), rows, "Differences"
        )
    return part("config", "Config", body)


def _made(found: _Found) -> Part:
    """Tell by which commands, and on what, the runs were made."""
    runs = [run for group in found.groups for run in group.runs]
    commands = dict.fromkeys(run.made_by.get("command", "not recorded") for run in runs)
    kinds = dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in run.made_by.items() if key != "command")
        for run in runs
    )
    body = "".join(f"<pre>{escape(command)}</pre>" for command in commands)
    body += "".join(f'<p class="faint">{escape(kind)}</p>' for kind in kinds)
    return part("made", "The commands that made these runs", body)
