"""Completion as a shell does it: the printed script is read by bash and asked."""

import shutil
import subprocess
import sys

import pytest

from pliant.cli import COMMANDS

ASK = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
complete -p pliant | grep -q -- "-F _pliant"
_pliant pliant "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


def pliant(*words):
    """Run the command by itself: it loads all others, which leaves traces in a process."""
    command = [sys.executable, "-m", "pliant", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here to complete in")
def test_bash_completes_commands_options_and_choices(tmp_path):
    script = tmp_path / "pliant"
    script.write_text(pliant("completion", "bash").stdout)

    def completed(*words):
        command = ["bash", "-c", ASK, "bash", script, "pliant", *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return answer.stdout.split()

    assert completed("") == [name for name, _, _ in COMMANDS]
    assert completed("re") == ["report"]
    assert "--resume" in completed("run", "--")
    assert completed("data", "g") == ["get"]
    assert completed("completion", "") == ["bash", "zsh", "fish"]
    assert completed("run", "pli") == ["pliant"]  # a file


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell):
    answer = pliant("completion", shell)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "compare" in answer.stdout


def test_an_unknown_shell_is_one_line():
    answer = pliant("completion", "tcsh")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1
