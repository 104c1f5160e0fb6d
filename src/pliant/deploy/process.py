"""Run the main function of a child process of pliant."""

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec
import torch

LOG_FORMAT = "%(levelname)s pliant: %(message)s"  # as supervisors forward it
EXIT_REPORTED = 3  # the last line of the log says why the process ended

S = TypeVar("S")


def run_process(
    main: Callable[[S], None], setup_type: type[S], reported: tuple[type[Exception], ...] = ()
) -> NoReturn:
    """Call `main` with the setup in the command line, and exit; report some errors in one line."""
    torch.set_num_threads(1)  # a device shares its machine, and results must not vary with it
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    exit_code = 0
    try:
        main(msgspec.json.decode(sys.argv[1].encode(), type=setup_type))
    except reported as error:
        sys.stderr.write(f"{error}\n")
        exit_code = EXIT_REPORTED
    sys.stderr.flush()
    os._exit(exit_code)  # torch and gRPC are slow to shut down
