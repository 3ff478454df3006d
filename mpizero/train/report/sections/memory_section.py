"""Compose what a report tells about memory: what was planned beside what was counted, by part and rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpizero._util.text import amount
from mpizero.train.report.history import RunHistory
from mpizero.train.report.markup import Markup, element, figure, joined, spot, table
from mpizero.train.report.measures import MemoryTable, last_with_memory, memory_tables
from mpizero.train.report.rank_pictures import draw_memory, part_colours
from mpizero.train.report.sections.columns import bytes_column
from mpizero.train.report.sections.time_sections import beside, few_ranks


def memory(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield pictures and tables of the memory of hosts and GPUs."""
    visit = last_with_memory(history.visits)
    for kind, found in memory_tables(visit.start, visit.memory).items() if visit else ():
        ranks = len(next(iter((*found.planned.values(), *found.counted.values()))))
        where = "on the host" if kind == "host" else "on GPUs"
        label = f"Bars of planned and counted memory by part, for each of {ranks} ranks; the table has the numbers."
        shown = [
            *(["planned (hatched)"] if found.planned else []),
            *(["counted where it is allocated, after the visit's first step (solid)"] if found.counted else []),
        ]
        caption = f"Memory {where} by rank: {', and '.join(shown)}.{few_ranks(ranks)}"
        yield beside(figure(draw_memory(f"{name}-memory-{kind}", label, found), caption), _memory_table(found, where))
    if visit and visit.memory:
        peak, resident = visit.memory.peak, visit.memory.resident
        most, largest = peak.index(max(peak)), resident.index(max(resident))
        beside_it = " Group buffers are not in this figure." if "group buffers" in visit.memory.counted else ""
        yield element(
            "p",
            f"Until the end of the visit's first step, rank {most} had the most arrays of the library's own at once: "
            f"{amount(peak[most])}B.{beside_it} The largest process is that of rank {largest}: "
            f"{amount(resident[largest])}B of resident memory, with Python, libraries and shared pages.",
        )
    if visit and visit.start and visit.start.not_planned:
        yield element("p", f"The plan is not whole: {visit.start.not_planned}.")


def _memory_table(found: MemoryTable, where: str) -> Markup:
    """Return the bytes of each part: of all ranks together, and of the rank that has most of it."""
    tints, columns, names = part_colours(found.parts), [], []
    for part in found.parts:
        names.append(joined([spot(tints[part]), part]))
        columns.append((found.planned.get(part), found.counted.get(part)))
    if totals := found.totals():
        names.append(Markup("total of parts in both" if found.only_planned or found.only_counted else "total"))
        columns.append(([planned for planned, _ in totals], [counted for _, counted in totals]))
    if found.counted and (found.only_counted or not totals):
        names.append(Markup("total counted"))
        columns.append((None, [sum(sizes) for sizes in zip(*found.counted.values(), strict=True)]))
    ranks = [max(range(len(known)), key=known.__getitem__) for p, c in columns if (known := p or c or [0])]
    heads, cells = ["part"], []
    for whose in ("all ranks", "one rank"):
        for kind, sizes in (("planned", [p for p, _ in columns]), ("counted", [c for _, c in columns])):
            if any(sizes):
                chosen = [
                    None if by_rank is None else sum(by_rank) if whose == "all ranks" else by_rank[rank]
                    for by_rank, rank in zip(sizes, ranks, strict=True)
                ]
                unit, shown = _cells(chosen)
                heads.append(f"{kind}, {whose}, {unit}")
                cells.append(shown)
    missing = f"; {', '.join(found.only_planned)} exist only while a step runs" if found.only_planned else ""
    rows = zip(names, *cells, map(str, ranks), strict=True)
    return table(f"Memory {where} by part{missing}", [*heads, "the rank with most"], rows)


def _cells(sizes: Sequence[int | None]) -> tuple[str, list[str]]:
    """Return the unit of a column of sizes, and its cells: "-" where there is none."""
    unit, shown = bytes_column([size or 0 for size in sizes])
    return unit, ["-" if size is None else text for size, text in zip(sizes, shown, strict=True)]
