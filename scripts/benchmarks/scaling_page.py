#!/usr/bin/env python
"""Compute the tables of docs/scaling.md with ``mpizero plan --json`` for an assumed cluster; compare or write them.

Without options, every table is computed and compared with the page. If some differ, the differences are printed and the
exit status is 1. With ``--write`` the new tables are written into the page. ``--tables`` names the tables to compute.
With ``--machine FILE`` only the machine file of the assumed cluster is written, from ``growing/assumed.py``. Nothing is
measured, and no MPI job is started. A plan of the largest model takes about ten seconds and half a gigabyte of memory.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
# Where `harness` is, and the library of this checkout, wherever the script is started.
sys.path[:0] = [str(PAGE.parents[1] / "scripts"), str(PAGE.parents[1])]

from growing.page import Plan, Row, Table, markdown, tables, write_assumed  # noqa: E402
from harness.options import chosen, plain  # noqa: E402
from harness.tables import between  # noqa: E402


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = plain(__doc__)
    names = ",".join(table.name for table in tables())
    parser.add_argument("--tables", default=names, help="(default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="write a machine file of the assumed cluster, no more"
    )
    args = parser.parse_args()
    args.tables = chosen("--tables", args.tables, names.split(","))
    return args


def replaced(page: str, table: Table, text: str) -> str:
    """Return the text of the page, in which ``text`` replaces what is between the marks of a table."""
    return between(page, f"<!-- table: {table.name} -->", "<!-- end -->", text, PAGE)


def main() -> None:
    """Compute the chosen tables, and compare them with the page, or with ``--write`` write them into it."""
    args = arguments()
    if args.machine:
        write_assumed(args.machine)
        return
    page = old = PAGE.read_text(encoding="utf-8")
    planned: dict[Row, Plan] = {}
    for table in tables():
        if table.name not in args.tables:
            continue
        for row in table.rows:
            if row not in planned:
                print(f"{table.name}: {row.name}", file=sys.stderr, flush=True)
                planned[row] = row.plan()
        text = markdown(table, planned)
        page = replaced(page, table, text)
        if args.write:  # write each table at once, so that it stays if a later one fails
            PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), table, text), encoding="utf-8")
    if page != old and not args.write:
        told = difflib.unified_diff(old.splitlines(), page.splitlines(), "docs/scaling.md", "made again", lineterm="")
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
