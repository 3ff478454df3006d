"""Hold and print the result of a comparison of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Describe the first number in which a layout differs from one process.

    Attributes
    ----------
    step : int
        From 1; 0 is before the first step.
    quantity : str
        "start value", "loss", "gradient before clipping", "gradient norm", "clip factor", "gradient after clipping",
        "optimizer slot 'exp_avg'", "parameter", "copy of a parameter".
    tensor : str or None
        The parameter; None where the quantity belongs to no tensor.
    ranks : tuple of int
        Of the layout; empty where no rank can be told.
    role : str
        What these ranks are: "computed by" is the rank at fault, "computed by one of" has it among the ranks that share
        a replica. "owned by" are those that add up and update the elements, not always those at fault. "on" are those
        that hold or see other values.
    index : tuple of int or None
        The first element that differs, in the whole tensor.
    found, expected : float or None
        Its value in this layout and in one process.
    differing, size : int
        How many of the tensor's elements differ, and how many it has.
    tensors : int
        How many tensors differ.
    seen : str or None
        The pattern of the differences.
    diagnosis : str or None
        The probable cause, where the numbers bear one.
    """

    step: int
    quantity: str
    tensor: str | None = None
    ranks: tuple[int, ...] = ()
    index: tuple[int, ...] | None = None
    found: float | None = None
    expected: float | None = None
    differing: int = 0
    size: int = 0
    tensors: int = 1
    diagnosis: str | None = None
    role: str = "on"
    seen: str | None = None

    def __str__(self) -> str:
        place = "" if self.tensor is None else f" {'' if self.quantity.endswith('parameter') else 'of '}{self.tensor!r}"
        if self.index:
            place += f" at [{', '.join(map(str, self.index))}]"
        if self.ranks:
            place += f" {self.role} rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        values = "" if self.expected is None and self.found is None else f": {_number(self.found)}"
        values += f", expected {_number(self.expected)}" if values else ""
        counts = [f"{self.differing} of {self.size} elements"] if self.size > 1 else []
        counts += [f"{self.tensors} tensors"] if self.tensors > 1 else []
        count = f" ({', '.join(counts)} differ)" if counts else ""
        reason = f"\n  seen: {self.seen}" if self.seen else ""
        reason += f"\n  probably: {self.diagnosis}" if self.diagnosis else ""
        return f"step {self.step}: {self.quantity}{place}{values}{count}{reason}"


def _number(value: float | None) -> str:
    return "none" if value is None else repr(float(value))


@dataclass(frozen=True)
class Verdict:
    """Hold how one layout compares with one process.

    Attributes
    ----------
    layout : str
        Its name.
    ranks, steps : int
        How many it has, and how many steps agreed.
    sha256 : str
        Hash of its last parameters.
    seconds : float
        That it took.
    tolerance : float or None
        The relative difference allowed; None is none at all.
    largest : float
        The largest relative difference that was allowed and seen.
    finding : Finding or None
        The first difference; None if there is none.
    """

    layout: str
    ranks: int
    steps: int
    sha256: str
    seconds: float
    tolerance: float | None = None
    largest: float = 0.0
    finding: Finding | None = None

    @property
    def verdict(self) -> str:
        """The verdict in words. Not collective."""
        if self.finding is not None:
            return f"differs at step {self.finding.step}"
        return "same bits" if self.tolerance is None else f"within {self.largest:.0e}"


@dataclass(frozen=True)
class Report:
    """Hold the verdicts on all layouts, the first that of one process."""

    verdicts: tuple[Verdict, ...]

    @property
    def agrees(self) -> bool:
        """Tell whether no layout differs. Not collective."""
        return not self.findings

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The first difference of each layout that has one. Not collective."""
        return tuple(v.finding for v in self.verdicts if v.finding is not None)

    def check(self) -> None:
        """Raise AssertionError, with what was found, if a layout differs. Not collective."""
        if not self.agrees:
            raise AssertionError(f"layouts differ from one process\n{self}")

    def __str__(self) -> str:
        return "\n".join([table(self.verdicts), *(f"{v.layout}: {v.finding}" for v in self.verdicts if v.finding)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values. Not collective."""
        return {"agrees": self.agrees, "layouts": [asdict(v) | {"verdict": v.verdict} for v in self.verdicts]}


def table(verdicts: Sequence[Verdict]) -> str:
    """Return one line a layout. Not collective."""
    width = max(len("layout"), *(len(v.layout) for v in verdicts))
    lines = [f"{'layout':{width}s}  {'ranks':>5s}  {'steps':>5s}  {'sha256':16s}  {'seconds':>7s}  verdict"]
    for v in verdicts:
        figures = f"{v.ranks:5d}  {v.steps:5d}  {v.sha256[:16]:16s}  {v.seconds:7.2f}"
        lines.append(f"{v.layout:{width}s}  {figures}  {v.verdict}")
    return "\n".join(lines)
