"""`pliant completion`: print a shell completion script."""

import sys
from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script that completes commands, options and paths.

    Example: pliant completion bash > ~/.local/share/bash-completion/completions/pliant

    Args:
        shell: Shell to print the script for.
    """
    from pliant.cli import build_app

    sys.stdout.write(
        build_app(None, is_plain=True).generate_completion(shell=shell).rstrip() + "\n"
    )
