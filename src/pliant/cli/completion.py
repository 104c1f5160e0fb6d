"""`pliant completion`: what a shell needs to complete pliant's commands and options."""

import sys
from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script that completes commands, options and paths; nothing is installed.

    Example: pliant completion bash > ~/.local/share/bash-completion/completions/pliant

    Parameters
    ----------
    shell
        The shell that reads it.
    """
    from pliant.cli import build

    sys.stdout.write(build(None, is_plain=True).generate_completion(shell=shell).rstrip() + "\n")
