"""Compose what a report of several runs tells about the settings and the environment in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpizero.train.report.history import RunHistory
from mpizero.train.report.markup import Markup, element, folded, table
from mpizero.train.report.sections.run_sections import environment, settings


def differences(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    """Yield the settings and the environment in which some runs differ."""
    without = [history.name for history in histories if history.start is None]
    known = [history for history in histories if history.start is not None]
    if without:
        yield element("p", f"Without a record of its configuration: {', '.join(without)}.")
    if len(known) < 2:
        return
    head = ("", *(history.name for history in known))
    chosen = [settings(history.start) for history in known]
    yield from _comparable(chosen)
    visits = " of the last visits" if any(len(history.visits) > 1 for history in known) else ""
    environments = [environment(history.start) for history in known if history.start]
    for what, values in ((f"settings{visits}", chosen), ("facts of the environment", environments)):
        rows = _rows(values)
        different = [row for row in rows if len(set(row[1:])) > 1]
        same = len(rows) - len(different)
        if different:
            yield table(f"The {what} that differ; the other {same} are the same", head, different)
            if any("-" in row for row in different):
                yield element("p", '"-": the run has no such setting. "not set": it has, and leaves it unset.')
        else:
            yield element("p", f"All {same} {what} are the same.")
    if same_environment(histories):
        yield folded("Environment of all runs", table("Environment of all runs", (), environments[0].items()))


def _rows(values: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    names = sorted({name for one in values for name in one})
    return [(name, *(one.get(name, "-") for one in values)) for name in names]


def _comparable(chosen: Sequence[dict[str, str]]) -> Iterator[Markup]:
    """Say so if models or data differ."""
    different = {row[0].split(".")[0] for row in _rows(chosen) if len(set(row[1:])) > 1}
    names = [f"[{name}]" for name in ("model", "data") if name in different]
    if names:
        yield element("p", f"The runs differ in {' and '.join(names)}: their losses may not be comparable.")


def same_environment(histories: Sequence[RunHistory]) -> bool:
    """Return whether all runs have recorded the same environment."""
    found = [environment(history.start) if history.start else {} for history in histories]
    return bool(found[0]) and all(one == found[0] for one in found)
