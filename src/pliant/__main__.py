"""What `python -m pliant` runs: the same as the `pliant` command."""

import sys

from pliant.cli import main

sys.exit(main())
