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
        The step, counted from 1; 0 for the start values, before the first step.
    quantity : str
        What differs: "start value", "loss", "gradient", "gradient before clipping", "gradient norm", "clip factor",
        "gradient after clipping", "optimizer slot 'exp_avg'", "parameter", "copy of a parameter".
    tensor : str or None
        Name of the parameter; None if the quantity belongs to no single parameter.
    ranks : tuple of int
        The layout's ranks that ``role`` describes; empty if no rank can be named.
    role : str
        What ``ranks`` are. "computed by": the ranks that computed a wrong value. "computed by one of": the ranks of a
        replica, one of which computed a wrong value. "owned by": the ranks that add up and update the differing
        elements, which need not be at fault. "on": the ranks on which the values differ.
    index : tuple of int or None
        Index of the first element that differs, in the whole tensor; None for a number such as the loss.
    found, expected : float or None
        The value in this layout and in one process.
    differing, size : int
        Number of elements of the tensor that differ, and number of all its elements.
    tensors : int
        Number of tensors that differ.
    seen : str or None
        The pattern that the differences show; None if they show none.
    diagnosis : str or None
        The probable cause; None if it is not known.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import compare_layouts
    >>> def of_size(comm):  # wrong: the model depends on the number of ranks
    ...     return mz.nn.MLP(2, [4], 2, seed=comm.size)
    >>> batch = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]], np.array([0, 1, 1, 0])
    >>> finding, = compare_layouts(of_size, [batch], ["2"], comm="self", micro_batch=2).findings
    >>> finding.step, finding.quantity, finding.tensor
    (0, 'start value', 'hidden.0.linear.weight')
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
    """Hold the result of comparing one layout with one process.

    Attributes
    ----------
    layout : str
        Name of the layout.
    ranks, steps : int
        Number of the layout's ranks, and number of steps that agreed.
    sha256 : str
        Hash of the parameters after the last step.
    seconds : float
        Seconds that the comparison took.
    tolerance : float or None
        The relative difference allowed; None if the bits must be equal.
    largest : float
        The largest relative difference that was found and is within the tolerance.
    finding : Finding or None
        The first difference; None if there is none.
    tiles : str
        Setting of the one process that the layout is compared with, such as "tiles=8"; "" if it has no tiles.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import compare_layouts
    >>> batch = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]], np.array([0, 1, 1, 0])
    >>> report = compare_layouts(lambda comm: mz.nn.MLP(2, [4], 2), [batch], ["2"], comm="self", micro_batch=2)
    >>> verdict = report.verdicts[1]
    >>> verdict.layout, verdict.ranks, verdict.steps, verdict.verdict
    ('zero2*2', 2, 1, 'same bits')
    >>> verdict.sha256 == report.verdicts[0].sha256  # the same bits as one process
    True
    """

    layout: str
    ranks: int
    steps: int
    sha256: str
    seconds: float
    tolerance: float | None = None
    largest: float = 0.0
    finding: Finding | None = None
    tiles: str = ""

    @property
    def verdict(self) -> str:
        """Return the verdict in words, such as "same bits" or "differs at step 3"."""
        if self.finding is not None:
            return f"differs at step {self.finding.step}"
        tiled = f" with {self.tiles}" if self.tiles else ""
        return f"same bits{tiled}" if self.tolerance is None else f"within {self.largest:.0e}{tiled}"


@dataclass(frozen=True)
class Report:
    """Hold the verdicts on all layouts; :func:`~mpizero.testing.compare_layouts` returns it.

    Attributes
    ----------
    verdicts : tuple of Verdict
        The verdict on each layout; the first is that of one process.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import compare_layouts
    >>> batch = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]], np.array([0, 1, 1, 0])
    >>> report = compare_layouts(lambda comm: mz.nn.MLP(2, [4], 2), [batch], ["2"], comm="self", micro_batch=2)
    >>> report.agrees, report.findings
    (True, ())
    >>> report.check()  # in a test: raises AssertionError with all findings where a layout differs
    """

    verdicts: tuple[Verdict, ...]

    @property
    def agrees(self) -> bool:
        """Tell whether all layouts agree with one process."""
        return not self.findings

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the first difference of each layout that differs."""
        return tuple(v.finding for v in self.verdicts if v.finding is not None)

    def check(self) -> None:
        """Raise AssertionError, with all findings, if a layout differs."""
        if not self.agrees:
            raise AssertionError(f"layouts differ from one process\n{self}")

    def __str__(self) -> str:
        return "\n".join([table(self.verdicts), *(f"{v.layout}: {v.finding}" for v in self.verdicts if v.finding)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, for JSON."""
        return {"agrees": self.agrees, "layouts": [asdict(v) | {"verdict": v.verdict} for v in self.verdicts]}


def table(verdicts: Sequence[Verdict]) -> str:
    """Format the verdicts as a table with one line for each layout."""
    width = max(len("layout"), *(len(v.layout) for v in verdicts))
    lines = [f"{'layout':{width}s}  {'ranks':>5s}  {'steps':>5s}  {'sha256':16s}  {'seconds':>7s}  verdict"]
    for v in verdicts:
        figures = f"{v.ranks:5d}  {v.steps:5d}  {v.sha256[:16]:16s}  {v.seconds:7.2f}"
        lines.append(f"{v.layout:{width}s}  {figures}  {v.verdict}")
    return "\n".join(lines)
