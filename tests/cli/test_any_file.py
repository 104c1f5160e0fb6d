"""Any TOML file near the schema gives a run or one clear line, and a refused one leaves nothing."""

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from tests.cli.any_file import BASE, format_file, make_damaged_texts, make_documents

from pliant.cli import main

CHECKS = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def check_file(command, text):
    """Give a file to a command: it ends with a run, or with one line and without files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.toml")
        path.write_text(text, newline="")
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main([command, str(path), "--out", str(Path(folder, "runs", "run"))])
        if code == 0:
            assert list(Path(folder, "runs", "run").rglob("events.jsonl")), text
            return
        line = errors.getvalue()
        assert code == 2, f"{text}\n{line}"
        assert line.startswith("pliant: "), f"{text}\n{line}"
        assert line.count("\n") == 1, f"{text}\n{line}"
        assert "internal error" not in line, f"{text}\n{line}"
        assert [found.name for found in Path(folder).iterdir()] == ["file.toml"], text


@settings(CHECKS, max_examples=12)
@given(make_documents())
def test_a_file_near_the_schema_is_run_or_refused_in_one_line(document):
    check_file("run", format_file(document))


@settings(CHECKS, max_examples=6)
@given(make_documents("compare"))
def test_a_matrix_near_the_schema_is_run_or_refused_in_one_line(document):
    check_file("compare", format_file(document))


@settings(CHECKS, max_examples=20)
@given(make_damaged_texts(format_file(BASE)))
def test_a_damaged_file_is_run_or_refused_in_one_line(text):
    check_file("run", text)
