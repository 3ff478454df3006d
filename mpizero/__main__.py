"""Run ``python -m mpizero``."""

import sys

from mpizero.train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
