"""Run the command line of mpizero on simulated GPUs: ``python -m tests.support.simulated train config.toml``."""

import sys

from mpizero.cli.main import main
from tests.support.simulated import simulate_gpus

if __name__ == "__main__":
    simulate_gpus()
    sys.exit(main())
