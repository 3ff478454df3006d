"""Run the command line of mpizero: ``python -m mpizero`` does the same as ``mpizero``."""

import sys

from mpizero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
