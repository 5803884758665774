"""`python -m kvyard`: the same as the `kvyard` command."""

import sys

from kvyard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
