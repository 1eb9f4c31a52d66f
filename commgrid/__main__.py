"""`python -m commgrid`, for launchers that start a module."""

import sys

from commgrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
