"""Run the `pliant` command as `python -m pliant`."""

import sys

from pliant.cli import main

sys.exit(main())
