"""Options that several scripts have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from harness.jobs import beside


def plain(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a script's docstring as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parser(doc: str | None, *, rounds: int = 0, mpiexec: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that several benchmarks have; ``doc`` is the description in its help.

    ``rounds`` is the default of ``--rounds``; 0 leaves the option out. ``mpiexec`` says whether to add the option of
    this name, and the hidden options of processes that the benchmark starts.
    """
    made = plain(doc)
    if rounds:
        made.add_argument("--rounds", type=positive, default=rounds, help="(default: %(default)s)")
    if mpiexec:
        made.add_argument("--mpiexec", default=beside(sys.executable))
        made.add_argument("--be", help=argparse.SUPPRESS)
        made.add_argument("--socket", help=argparse.SUPPRESS)
    return made


def positive(text: str) -> int:
    """Return the value of an option that must be a whole number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def chosen(option: str, text: str, known: Iterable[str], bare: Callable[[str], str] = str) -> list[str]:
    """Return the names in ``text``, the comma-separated value of an option.

    End the script if ``bare(name)``, what a name has besides numbers, is not ``known``.
    """
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(map(bare, names)) - set(known)):
        sys.exit(f"{option}: unknown {', '.join(unknown)}; expected {', '.join(known)}")
    return names
