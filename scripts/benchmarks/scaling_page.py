#!/usr/bin/env python
"""Compute the tables of docs/scaling.md with ``mpizero plan --json`` for an assumed cluster; compare or write them.

Without options, every table is computed and compared with the page. If some differ, the differences are printed and the
exit status is 1. With ``--write`` the new tables are written into the page. With ``--machine FILE`` only the machine
file of the assumed cluster is written, from ``growing/assumed.py``. Nothing is measured, and no MPI job is started. A
plan of the largest model takes about ten seconds and half a gigabyte of memory.
"""

from __future__ import annotations

import difflib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
# Where `harness` is, and the library of this checkout, wherever the script is started.
sys.path[:0] = [str(PAGE.parents[1] / "scripts"), str(PAGE.parents[1])]

from growing.assumed import Assumed  # noqa: E402
from harness.jobs import well  # noqa: E402
from harness.options import plain  # noqa: E402
from harness.tables import between, markdown  # noqa: E402

from mpizero.tools.plan.time import write_machine  # noqa: E402

CONFIG = Path(__file__).with_name("growing") / "gpt3.toml"
RANKS_PER_NODE, MEMORY_PER_NODE = 8, "1536GB"
#: Replicas of the model on 512 ranks, and micro-batches of a replica in the rows of a table.
REPLICAS, MICRO_BATCHES = 8, (8, 32, 192)
STRATEGIES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1}
#: Stages and replicas of the layouts by number of ranks; all have tensor groups of 8.
LAYOUTS = {8: (1, 1), 64: (8, 1), 512: (8, 8)}
#: Features, layers and heads of models with about 340 million parameters a rank, by number of ranks.
GROWING = {8: (2560, 32, 32), 64: (6144, 48, 64), 512: (12288, 96, 96)}

Plan = Mapping[str, Any]


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="assumed-")  # until this process ends


def machine() -> Path:
    """Return the path of a machine file of the assumed cluster, which is there as long as this process."""
    path = Path(_folder().name, "machine.json")
    if not path.exists():
        write_assumed(path)
    return path


def write_assumed(path: Path) -> None:
    """Write the machine file of the assumed cluster, for the products of GPT-3."""
    write_machine(str(path), Assumed().machine(rows=2048, dim=12288))


@dataclass(frozen=True)
class Row:
    """Describe the training that is planned for one row of a table.

    ``settings`` replace those of the configuration file, each "section.name=value" as for ``--set``.
    """

    name: str
    ranks: int
    settings: tuple[str, ...]

    def plan(self) -> Plan:
        """Run ``mpizero plan`` for this training, and return the JSON document that it prints."""
        command = [sys.executable, "-m", "mpizero", "plan", str(CONFIG), "--ranks", str(self.ranks), "--json"]
        command += ["--ranks-per-node", str(RANKS_PER_NODE), "--memory-per-node", MEMORY_PER_NODE]
        command += ["--machine", str(machine())]
        command += [word for setting in self.settings for word in ("--set", setting)]
        found: Plan = json.loads(well(command, status=(0, 1)).out)
        return found


@dataclass(frozen=True)
class Table:
    """Describe a table of docs/scaling.md, which is preceded there by a mark with its name.

    ``cells`` returns the texts of a row's cells, from the row and its plan, the document of ``mpizero plan``.
    """

    name: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Callable[[Row, Plan], Sequence[str]]


def tables() -> tuple[Table, ...]:
    """Return all tables of docs/scaling.md."""
    whole = len(STRATEGIES)
    parts = ("parameters", "gradients", "optimizer state", "buffers", "activations, work")
    sent = ("gradients", "parameters", "activations", "rest")
    return (
        Table("memory", ("GB", *parts, "a rank", "a node", "/dev/shm"), stage_rows(), _memory),
        Table("bytes", ("GB a step", *sent, "a rank", "all ranks"), stage_rows(), _sent),
        Table("seconds", ("seconds a step", *STRATEGIES.values()), stage_rows()[:whole], _phases),
        Table(
            "bubble",
            ("schedule", "micro-batches a replica", "bubble", "activations, GB", "seconds a step", "efficiency"),
            tuple(_bubble_rows()),
            _bubble,
        ),
        Table("strong", ("ranks", *_GROWTH[1:]), tuple(_strong_rows()), _growth),
        Table("weak", ("ranks", *_GROWTH[1:]), tuple(_weak_rows()), _growth),
    )


_GROWTH = ("ranks", "stages x parts x replicas", "billion parameters", "a node, GB", "bubble", "seconds a step",
           "tokens/s", "efficiency")  # fmt: skip


def stage_rows() -> tuple[Row, ...]:
    """Return a row for each strategy on 512 ranks."""
    return tuple(Row(f"stage-{name}", 512, (f"parallel.strategy={name}",)) for name in STRATEGIES)


def _bubble_rows() -> Iterator[Row]:
    for schedule, virtual in SCHEDULES.items():
        for micro in MICRO_BATCHES:
            settings = (f"parallel.schedule={schedule}", f"parallel.virtual_stages={virtual}")
            yield Row(f"bubble-{schedule}-{micro}", 512, (*settings, *_share(micro)))


def _share(micro: int) -> tuple[str, str]:
    """Return the settings with which each replica computes one grain of ``micro`` micro-batches in a step."""
    return f"train.global_batch={REPLICAS * micro}", f"train.accumulate={micro}"


def _strong_rows() -> Iterator[Row]:
    for ranks, (stages, _) in LAYOUTS.items():
        yield Row(f"strong-{ranks}", ranks, (f"parallel.pipeline={stages}",))


def _weak_rows() -> Iterator[Row]:
    for ranks, (dim, layers, heads) in GROWING.items():
        shape = (f"model.dim={dim}", f"model.layers={layers}", f"model.heads={heads}")
        yield Row(f"weak-{ranks}", ranks, (f"parallel.pipeline={LAYOUTS[ranks][0]}", *shape))


# ---------------------------------------------------------------------- figures of a plan


def seconds(plan: Plan) -> float:
    """Return the seconds that a step is expected to take."""
    found: float = plan["expected"]["seconds"]
    return found


def efficiency(plan: Plan) -> float:
    """Return the fraction of a step's time in which ranks compute forward and backward passes, as a mean over ranks."""
    busy = statistics.fmean(rank["forward"] + rank["backward"] for rank in plan["expected"]["ranks"])
    return busy / seconds(plan)


def fullest(plan: Plan) -> Plan:
    """Return the part of the plan for the rank that needs the most memory."""
    found: Plan = max(plan["ranks"], key=lambda rank: rank["bytes"])
    return found


def mine(rank: Plan, *parts: str) -> float:
    """Return the bytes that a rank needs for the kinds of memory ``parts``, with its equal share of shared windows."""
    held = [rank["memory"][part] for part in parts if part in rank["memory"]]
    return sum(part["private"] + part["shared"] / part["sharers"] for part in held)


def giga(nbytes: float, digits: int = 1) -> str:
    """Format a number of bytes in gigabytes (10^9 bytes), with ``digits`` decimals."""
    return f"{nbytes / 1e9:,.{digits}f}"


def percent(share: float) -> str:
    """Format a fraction in percent."""
    return f"{100 * share:.1f} %"


def time(value: float) -> str:
    """Format seconds with about four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_MAIN = ("parameters", "gradients", "optimizer state")
_RUN = ("activations", "working arrays", "messages")


def _memory(row: Row, plan: Plan) -> list[str]:
    rank = fullest(plan)
    others = [part for part in rank["memory"] if part not in (*_MAIN, *_RUN)]
    figures = [*(mine(rank, part) for part in _MAIN), mine(rank, *others), mine(rank, *_RUN), rank["bytes"]]
    node = max(plan["nodes"], key=lambda node: node["bytes"])
    name = STRATEGIES[plan["strategy"]]
    return [name, *map(giga, figures), giga(node["bytes"], 0), giga(node["window_bytes"], 0)]


def _sent(row: Row, plan: Plan) -> list[str]:
    rank = max(plan["ranks"], key=lambda rank: rank["bytes_sent"])
    purposes = ("gradients", "parameters", "activations")
    shown = [rank["sent"].get(purpose, {"bytes": 0})["bytes"] for purpose in purposes]
    total = sum(rank["bytes_sent"] for rank in plan["ranks"])
    figures = [*shown, rank["bytes_sent"] - sum(shown), rank["bytes_sent"], total]
    return [STRATEGIES[plan["strategy"]], *map(giga, figures)]


def _phases(row: Row, plan: Plan) -> list[str]:
    """Return the seconds of each phase of the slowest rank, then of the whole step, and the efficiency.

    :func:`written` writes them as a column of the table.
    """
    parts = plan["expected"]["ranks"][plan["expected"]["rank"]]
    return [*map(time, parts.values()), time(seconds(plan)), percent(efficiency(plan))]


def _bubble(row: Row, plan: Plan) -> list[str]:
    pipeline = plan["pipeline"]
    held = giga(max(mine(rank, "activations") for rank in plan["ranks"]))
    figures = [percent(pipeline["bubble_share"]), held, time(seconds(plan)), percent(efficiency(plan))]
    return [pipeline["schedule"], str(pipeline["micro_batches"]), *figures]


def _growth(row: Row, plan: Plan) -> list[str]:
    axes = plan["axes"]
    layout = f"{axes['pipeline']} x {axes['tensor']} x {axes['data']}"
    bubble = percent(plan["pipeline"]["bubble_share"]) if plan["pipeline"] else "none"
    node = giga(max(node["bytes"] for node in plan["nodes"]), 0) + ("" if plan["fits"] else " (does not fit)")
    tokens = 2048 * plan["expected"]["samples_per_second"]
    figures = [f"{plan['parameter_count'] / 1e9:.1f}", node, bubble, time(seconds(plan)), f"{tokens:,.0f}"]
    return [str(row.ranks), layout, *figures, percent(efficiency(plan))]


def written(table: Table, plans: Mapping[Row, Plan]) -> str:
    """Return a whole table as Markdown; ``plans`` has the plan of each of its rows."""
    rows = [table.cells(row, plans[row]) for row in table.rows]
    if table.name == "seconds":
        phases = list(plans[table.rows[0]]["expected"]["ranks"][0])
        rows = [list(cells) for cells in zip([*phases, "all", "efficiency"], *rows, strict=True)]
    return markdown(table.head, rows)


def main() -> None:
    """Compute the tables, and compare them with the page, or with ``--write`` write them into it."""
    parser = plain(__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="write a machine file of the assumed cluster, no more"
    )
    args = parser.parse_args()
    if args.machine:
        write_assumed(args.machine)
        return
    page = old = PAGE.read_text(encoding="utf-8")
    planned: dict[Row, Plan] = {}
    for table in tables():
        for row in table.rows:
            if row not in planned:
                print(f"{table.name}: {row.name}", file=sys.stderr, flush=True)
                planned[row] = row.plan()
        page = between(page, f"<!-- table: {table.name} -->", "<!-- end -->", written(table, planned), PAGE)
    if args.write:
        PAGE.write_text(page, encoding="utf-8")
    elif page != old:
        told = difflib.unified_diff(old.splitlines(), page.splitlines(), "docs/scaling.md", "made again", lineterm="")
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
