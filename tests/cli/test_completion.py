"""The completion scripts, run by a real shell."""

import shutil
import subprocess
import sys

import pytest

from pliant.cli import COMMANDS

COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
complete -p pliant | grep -q -- "-F _pliant"
_pliant pliant "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


def run_pliant(*words):
    """Run pliant in its own process, because completion imports all commands."""
    command = [sys.executable, "-m", "pliant", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(tmp_path):
    script = tmp_path / "pliant"
    script.write_text(run_pliant("completion", "bash").stdout)

    def complete(*words):
        command = ["bash", "-c", COMPLETE, "bash", script, "pliant", *words]
        process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return process.stdout.split()

    assert complete("") == [name for name, _, _ in COMMANDS]
    assert complete("re") == ["report"]
    assert "--resume" in complete("run", "--")
    assert complete("data", "g") == ["get"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]
    assert complete("run", "pli") == ["pliant"]  # a file


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell):
    process = run_pliant("completion", shell)
    assert (process.returncode, process.stderr) == (0, "")
    assert "compare" in process.stdout


def test_an_unknown_shell_is_a_one_line_error():
    process = run_pliant("completion", "tcsh")
    assert (process.returncode, process.stdout) == (2, "")
    assert len(process.stderr.splitlines()) == 1
