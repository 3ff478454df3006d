"""Name layouts, and hold the results of comparing them with one process: verdicts, findings and probable causes.

:class:`Layout` is read from its name, such as ``4``, ``zero3*4`` or ``pipeline=2, data=2``. A printable :class:`Report`
holds a :class:`Verdict` for each layout, with the :class:`Finding` that describes the first number that differs. The
functions :func:`diagnose_loss` to :func:`diagnose_update` find the probable cause of a difference from the pattern in
the numbers. No function of this module communicates.

[Note: cause and pattern] A cause is named only if no other cause known to this module would produce the same numbers.
The pattern in the numbers is named in any case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.numbers import Rounding, largest
from mpizero._util.text import columns
from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES, chunk_stages
from mpizero.layout.fields import TILES
from mpizero.sharding.exactness import within_rounding
from mpizero.sharding.partition import TILED_AXES, Tiles, can_host
from mpizero.train.config.sections import STRATEGIES, ParallelSection
from mpizero.types import Array

_SIZES = ("pipeline", "tensor", "context", "data", "tiles", "virtual_stages", "ranks_per_node", "shard_nodes")
_KEYS = (*_SIZES, "domain", "strategy", "schedule", "grain_assignment")
_WORDS: dict[str, dict[str, Any]] = {"private": {"share_node_memory": False}}
_WORDS |= {word: {"strategy": word} for word in STRATEGIES}
_ALLOWED = (
    f"expected a number of ranks, {', '.join(STRATEGIES)} (with *N: on N ranks), {', '.join(_KEYS)} as key=value, "
    "or private, separated by commas"
)


@dataclass(frozen=True)
class Layout:
    """Describe how a training is split over ranks: strategy, sizes of groups, schedule, kind of memory.

    Attributes
    ----------
    parallel : ParallelSection
        The layout as a section of the configuration; its ``data`` is the number of replicas, never -1.
    """

    parallel: ParallelSection

    @classmethod
    def parse(cls, text: str, strategy: str = "zero2") -> Layout:
        """Read one layout from its name; ``strategy`` is used if the name has no strategy.

        Not collective.

        Raises
        ------
        ConfigError
            If a word is not understood; the message names the layout, the word and what is allowed.
        """
        settings: dict[str, Any] = {}
        ranks = None
        for word in filter(None, (word.strip() for word in text.split(","))):
            match = re.fullmatch(r"(?:(\w+)\s*=\s*(\w+)|([a-z]\w*))?\s*(?:(?:^|\*)\s*(\d+))?", word)
            if match is None:
                raise ConfigError(f"layout {text!r}: {word!r} is not understood: {_ALLOWED}")
            key, value, name, number = match.groups()
            ranks = int(number) if number else ranks
            pairs = {key: value} if key else {} if name is None else _WORDS.get(name)
            if pairs is None or not pairs.keys() <= {*_KEYS, "share_node_memory"} or pairs.keys() & settings.keys():
                raise ConfigError(f"layout {text!r}: {word!r} is not understood, or given twice: {_ALLOWED}")
            settings |= {k: _setting(k, v) for k, v in pairs.items()}
        if not settings and ranks is None:
            raise ConfigError(f"layout {text!r} is empty: {_ALLOWED}")
        try:
            parallel = ParallelSection(**{"strategy": strategy, "data": 1, **settings})
            if ranks is not None:
                chosen = replace(parallel, data=settings.get("data", -1))
                parallel = replace(chosen, data=chosen.axes_of(ranks).data)
        except ConfigError as error:
            raise ConfigError(f"layout {text!r}: {error}") from None
        return cls(parallel)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the layout."""
        return self.parallel.pipeline * self.parallel.tensor * self.parallel.sample_parts * self.parallel.data

    def resolve_tiles(self, tiles: Tiles) -> Layout:
        """Return the layout with the setting ``tiles``; unchanged if it already has one."""
        return self if self.parallel.tiles is not None else Layout(replace(self.parallel, tiles=tiles))

    def rounds(self, accumulate: int) -> bool:
        """Tell whether the layout adds in an order that one process cannot reproduce, whatever the model is.

        ``accumulate`` is the number of micro-batches in a grain.
        """
        return bool(within_rounding(self.parallel.parallel_layout(), None, accumulate=accumulate))

    @property
    def alone(self) -> Layout:
        """The layout of the one process to compare with; it has this layout's tiles if one process can have them."""
        tiles = self.parallel.tiles
        if tiles is None:
            sizes = {axis: getattr(self.parallel, axis) for axis in TILED_AXES}
            tiles = {axis: size for axis, size in sizes.items() if size > 1 and can_host(1, size)} or None
        return ONE_PROCESS.resolve_tiles(tiles)

    def __str__(self) -> str:
        parallel, axes = self.parallel, ("pipeline", "tensor", "context")
        named = {axis: getattr(parallel, axis) > 1 for axis in axes} | {
            "domain": bool(parallel.domain),
            "data": parallel.splits_model and parallel.data > 1,
            "schedule": parallel.pipeline > 1,
            "virtual_stages": parallel.pipeline > 1 and parallel.virtual_stages > 1,
            "ranks_per_node": parallel.ranks_per_node is not None,
            "shard_nodes": parallel.shard_nodes is not None,
            "tiles": isinstance(parallel.tiles, int),
            "grain_assignment": parallel.grain_assignment != "static",
        }
        values = {name: getattr(parallel, name) for name, is_named in named.items() if is_named}
        words = [f"{name}={'x'.join(map(str, v)) if name == 'domain' else v}" for name, v in values.items()]
        private = [] if parallel.share_node_memory else ["private"]
        return ", ".join([f"{parallel.strategy}*{self.ranks}", *words, *private])

    def group_sizes(self) -> dict[str, int]:
        """Return the sizes of the layout that are above 1, by the name of what is counted, such as "replicas"."""
        parallel = self.parallel
        sizes = {
            "ranks": self.ranks,
            "replicas": parallel.data,
            "ranks of a tensor group": parallel.tensor,
            "ranks of a context group": parallel.context,
            "ranks of a domain": parallel.sample_parts // parallel.context,
            "pipeline stages": parallel.pipeline,
        }
        return {name: size for name, size in sizes.items() if size > 1}


def _setting(key: str, value: Any) -> Any:
    """Return the value of a key of a layout's name: a number, the numbers of a domain such as "2x2", or a word."""
    text = str(value)
    if key == "domain" and re.fullmatch(r"\d+(x\d+)*", text):
        return tuple(map(int, text.split("x")))
    return int(text) if key in _SIZES and text.isdecimal() else value


#: The layout of one process, with which all layouts are compared.
ONE_PROCESS = Layout(ParallelSection(strategy="ddp", data=1))


def parse_layouts(text: str, strategy: str) -> list[Layout]:
    """Read layouts separated by semicolons; ``strategy`` is used for layouts without a strategy."""
    return [Layout.parse(part, strategy) for part in text.split(";") if part.strip()]


def each_once(layouts: Iterable[Layout], tiles: Tiles) -> list[Layout]:
    """Give ``tiles`` to layouts without that setting, and return the first layout of each name.

    Not collective. Layouts that differ only in settings outside the name count as one. Most such settings change
    nothing in a comparison (``bucket_mb``, or ``schedule`` without a pipeline); ``order`` and ``cuts`` may.
    """
    by_name: dict[str, Layout] = {}
    for layout in layouts:
        placed = layout.resolve_tiles(tiles)
        by_name.setdefault(str(placed), placed)
    return list(by_name.values())


def default_layouts(ranks: int, *, blocks: int, heads: int = 1, sequence: int = 0, space: int = 0) -> list[Layout]:
    """Return the layouts that are compared by default: all strategies, pipelines, tensor and context group, a domain.

    Not collective.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    blocks : int
        Number of blocks of the model; a pipeline has at most as many chunks.
    heads : int
        Number of attention heads, which the size of a tensor group must divide; 1 leaves tensor groups out.
    sequence : int
        Length of a sequence, which a context group cuts; 0 leaves context groups out.
    space : int
        Number of axes of space of the fields, of which a domain cuts the first; 0 leaves domains out.
    """
    layouts = [ParallelSection(strategy=strategy, data=ranks) for strategy in STRATEGIES]
    private = ("ddp", "zero3") if ranks > 1 else ()
    layouts += [ParallelSection(strategy=strategy, data=ranks, share_node_memory=False) for strategy in private]
    layouts += _pipelines(ranks, blocks)
    tensor = _largest(ranks, lambda n: heads % n == 0)
    context = _largest(ranks, lambda n: 2 * n <= sequence)
    if tensor > 1:
        layouts.append(ParallelSection(strategy="zero1", tensor=tensor, data=ranks // tensor))
    if context > 1:
        layouts.append(ParallelSection(strategy="zero1", context=context, data=ranks // context))
    parts = _largest(ranks, lambda n: bool(space) and n <= TILES[space])
    if parts > 1:
        domain = (parts, *(1 for _ in range(space - 1)))
        layouts.append(ParallelSection(strategy="zero1", domain=domain, data=ranks // parts))
    return [Layout(parallel) for parallel in layouts]


def _pipelines(ranks: int, blocks: int) -> Iterator[ParallelSection]:
    """Yield a layout with a pipeline for every possible number of stages; schedules and strategies alternate."""
    number = 0
    schedules = ("1f1b", *(name for name in SCHEDULES if name != "1f1b"))
    for stages in (n for n in range(2, ranks + 1) if ranks % n == 0):
        first = number % len(schedules)
        for schedule in (*schedules[first:], *schedules[:first]):
            virtual = 2 if schedule == "interleaved" else 1
            if len(chunk_stages(schedule, stages, virtual)) <= blocks:
                yield ParallelSection(
                    strategy=STRATEGIES[number % len(STRATEGIES)],
                    pipeline=stages,
                    data=ranks // stages,
                    schedule=schedule,
                    virtual_stages=virtual,
                )
                number += 1
                break


def _largest(ranks: int, fits: Any) -> int:
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and (n == 1 or fits(n)))


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
        How ``ranks`` are involved. "computed by": the ranks that computed a wrong value. "computed by one of": the
        ranks of a replica, one of which computed a wrong value. "owned by": the ranks that add up and update the
        differing elements, which need not be at fault. "on": the ranks on which the values differ.
    index : tuple of int or None
        Index of the first element that differs, in the whole tensor; None for a number such as the loss.
    found, expected : float or None
        The value in this layout and in one process.
    differing, size : int
        Number of elements of the tensor that differ, and number of all its elements.
    tensors : int
        Number of tensors that differ.
    seen : str or None
        The pattern in the differences, as text; None if there is none.
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
        location = (
            "" if self.tensor is None else f" {'' if self.quantity.endswith('parameter') else 'of '}{self.tensor!r}"
        )
        if self.index:
            location += f" at [{', '.join(map(str, self.index))}]"
        if self.ranks:
            location += f" {self.role} rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        values = "" if self.expected is None and self.found is None else f": {_number(self.found)}"
        values += f", expected {_number(self.expected)}" if values else ""
        counts = [f"{self.differing} of {self.size} elements"] if self.size > 1 else []
        counts += [f"{self.tensors} tensors"] if self.tensors > 1 else []
        count = f" ({', '.join(counts)} differ)" if counts else ""
        reason = f"\n  seen: {self.seen}" if self.seen else ""
        reason += f"\n  probably: {self.diagnosis}" if self.diagnosis else ""
        return f"step {self.step}: {self.quantity}{location}{values}{count}{reason}"


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
        Hash of the parameters after the last step that was done; a step that differs is the last one.
    seconds : float
        Seconds that the comparison took.
    tolerance : float or None
        The relative difference allowed; None if the bits must be equal.
    largest : float
        The largest relative difference that was found and is within the tolerance.
    finding : Finding or None
        The first difference; None if there is none.
    tiles : str
        Tiles of the one process that the layout is compared with, such as "tiles=8"; "" if it has none.

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
    rows = [["layout", "ranks", "steps", "sha256", "seconds", "verdict"]]
    rows += [[v.layout, str(v.ranks), str(v.steps), v.sha256[:16], f"{v.seconds:.2f}", v.verdict] for v in verdicts]
    return columns(rows, left=(0, 3, 5))


_ROUNDING = "numbers added in another order: the differences are of the size of rounding"
_DEPENDS = "something depends on the rank: random numbers keyed by it, data of its own, or its processor and libraries"


class Diagnosis(NamedTuple):
    """Hold the probable cause of a difference, and the pattern in the numbers, as texts; None if there is none."""

    cause: str | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class LossEvidence:
    """Hold the mean losses of one batch that the layout and one process computed from equal parameters.

    Attributes
    ----------
    first, again : float
        Loss in the layout, from two evaluations in training mode.
    expected : float
        Loss in one process, in training mode.
    quiet, quiet_expected : float
        Loss outside of training mode, so without dropout, in the layout and in one process.
    weight, weight_expected : float
        The divisor of the sum of losses, in the layout and in one process.
    grains : mapping of int to (float, int)
        By index of the grain, its loss sum in the layout, and the rank that computed it.
    grains_expected : mapping of int to float
        By index of the grain, its loss sum in one process.
    rounding : Rounding
        Bounds on rounding errors in this training.
    """

    first: float
    again: float
    expected: float
    quiet: float
    quiet_expected: float
    weight: float
    weight_expected: float
    grains: Mapping[int, tuple[float, int]]
    grains_expected: Mapping[int, float]
    rounding: Rounding

    @property
    def wrong_grains(self) -> list[int]:
        """Return the indices of the grains whose loss differs from one process, in order."""
        pairs = ((g, loss, self.grains_expected.get(g)) for g, (loss, _) in sorted(self.grains.items()))
        return [g for g, loss, wanted in pairs if wanted is not None and not self.rounding.same(loss, wanted)]

    @property
    def wrong_ranks(self) -> set[int]:
        """Return the ranks that computed a grain whose loss differs from one process."""
        return {self.grains[grain][1] for grain in self.wrong_grains}

    @property
    def right_ranks(self) -> set[int]:
        """Return the ranks that computed only grains whose loss is the same as in one process."""
        return {rank for _, rank in self.grains.values()} - self.wrong_ranks


class RankGradients(NamedTuple):
    """Hold how the gradients that one rank computed for one tensor differ from the gradients in one process.

    The gradients of each micro-batch are compared.

    Attributes
    ----------
    rank : int
        The rank's number in the layout.
    grains : tuple of int
        The grains of this rank whose gradients differ.
    factor : float or None
        The factor f with gradient = f * gradient in one process for all these gradients; None if there is none.
    largest : float
        The largest difference of an element, relative to the largest element of these gradients in one process.
    """

    rank: int
    grains: tuple[int, ...]
    factor: float | None
    largest: float


@dataclass(frozen=True)
class GradientEvidence:
    """Hold the gradients of the parameters whose gradients differ, computed from equal parameters.

    Each mapping has the name of a parameter as key, and values of its gradient.

    Attributes
    ----------
    actual, again : mapping of str to array
        Averaged gradient in the layout, from two evaluations.
    expected : mapping of str to array
        Averaged gradient in one process.
    owner_sums : mapping of str to array
        For each element, the gradient sum over only the samples of the rank that updates this element.
    uses : mapping of str to mapping of str to array
        By parameter and by name of the use, the part of each use in the parameter's averaged gradient; a parameter
        that is not tied has one use.
    computed : sequence of RankGradients
        The comparison of each rank's gradients before they are added up; empty if they cannot be compared.
    tensors : int
        Number of trainable tensors of the model.
    rounding : Rounding
        Bounds on rounding errors in this training.
    """

    actual: Mapping[str, Array]
    again: Mapping[str, Array]
    expected: Mapping[str, Array]
    owner_sums: Mapping[str, Array]
    uses: Mapping[str, Mapping[str, Array]]
    computed: Sequence[RankGradients]
    tensors: int
    rounding: Rounding

    @property
    def wrong_ranks(self) -> list[int]:
        """Return the ranks that computed gradients that differ from one process."""
        return [one.rank for one in self.computed if one.grains]

    @property
    def right_again(self) -> bool:
        """Tell whether the second evaluation in the layout gave the same gradients as one process."""
        if self.rounding.tolerance is None:
            return _same_bits(self.again, self.expected)
        return all(self.rounding.close(self.again[name], self.expected[name]) for name in self.expected)


def diagnose_loss(evidence: LossEvidence, counts: Mapping[str, int]) -> Diagnosis:
    """Find the probable cause of a loss that differs.

    ``counts`` has numbers by which a sum may have been divided by mistake, by the name of what is counted, such as
    ``{"ranks": 4}``.
    """
    rounding, wrong, right = evidence.rounding, evidence.wrong_ranks, evidence.right_ranks
    if repeated := _repeated(rounding.same(evidence.again, evidence.expected), evidence.again == evidence.first):
        return Diagnosis(repeated)
    if not rounding.near(evidence.weight, evidence.weight_expected) and rounding.near(
        evidence.first * evidence.weight, evidence.expected * evidence.weight_expected
    ):
        divided = f"equal loss sums, divided by {evidence.weight:.17g}, expected {evidence.weight_expected:.17g}"
        return _wrong_count("the loss", evidence.weight_expected / evidence.weight, counts, rounding)._replace(
            pattern=divided
        )
    pattern: str | None = None
    if wrong and right:
        pattern = f"only the samples of {_ranks(wrong)} have other losses, with equal parameters"
    if rounding.near(evidence.quiet, evidence.quiet_expected) and not rounding.near(
        evidence.expected, evidence.quiet_expected
    ):
        where = "keyed by the rank" if pattern else "that depend on the layout"
        advice = "without dropout the losses of this batch are equal; key them by sample, element and step"
        return Diagnosis(f"random numbers {where}: {advice}", pattern)
    if pattern:
        return Diagnosis(_DEPENDS, pattern)
    if evidence.grains and not wrong:
        pattern = "the losses of all micro-batches are equal: their sum is not"
    if rounding.near(evidence.first, evidence.expected):
        return Diagnosis(_ROUNDING, pattern)
    diagnosis = (
        _wrong_count("the loss", evidence.first / evidence.expected, counts, rounding)
        if evidence.expected
        else Diagnosis()
    )
    return Diagnosis(diagnosis.cause, pattern)


def diagnose_gradient(evidence: GradientEvidence, counts: Mapping[str, int]) -> Diagnosis:
    """Find the probable cause of a gradient that differs although the loss is the same.

    ``counts`` is as for :func:`diagnose_loss`.
    """
    actual, expected, rounding, pattern = evidence.actual, evidence.expected, evidence.rounding, _computed(evidence)
    if repeated := _repeated(evidence.right_again, _same_bits(evidence.again, actual)):
        return Diagnosis(repeated, pattern)
    if 0 < len(evidence.wrong_ranks) < len(evidence.computed):
        return Diagnosis(_DEPENDS, pattern)
    small = all(rounding.close(actual[name], expected[name]) for name in actual)
    if small or evidence.wrong_ranks:
        return Diagnosis(_ROUNDING if small else None, pattern)
    factor = rounding.factor(list(actual.values()), list(expected.values()))
    if factor is not None and len(actual) == evidence.tensors > 1:
        return _with(_wrong_count("every gradient", factor, counts, rounding), pattern)
    if cause := _tied(evidence):
        return Diagnosis(cause, pattern)
    if _skipped(evidence):
        reason = "a skipped reduction: each owner has the gradient of its own samples alone, not the sum over the ranks"
        return Diagnosis(reason, pattern)
    if factor is not None:
        which = "the gradient of this tensor" if len(actual) == 1 else "the gradients of these tensors"
        return _with(_wrong_count(which, factor, counts, rounding), pattern)
    return Diagnosis(None, pattern)


def diagnose_norm(
    actual: float | None, expected: float | None, rounding: Rounding, counts: Mapping[str, int]
) -> Diagnosis:
    """Find the probable cause of a gradient norm that differs although the gradient is the same.

    ``actual`` is the norm in the layout, ``expected`` in one process; None if no norm was computed. ``counts`` is as
    for :func:`diagnose_loss`.
    """
    if actual is None or not expected:
        return Diagnosis("a missed clip: this layout never asked for the norm" if expected else None)
    if rounding.near(actual, expected):
        return Diagnosis(_ROUNDING)
    ratio = (actual / expected) ** 2
    pattern = f"the sum of squares is {_times(ratio)} that of the same gradient in one process"
    for what, size in counts.items():
        if rounding.near(ratio, size):
            reason = f"squares counted {size} times, the number of {what}"
            return Diagnosis(f"{reason}: the norm is {ratio**0.5:.4g} times too large", pattern)
    return Diagnosis(None, pattern)


def diagnose_clipped(actual: Array, before: Array, expected: Array, rounding: Rounding) -> Diagnosis:
    """Find the probable cause of a clipped gradient that differs although gradient and norm are the same.

    The arrays have the differing elements: ``actual`` after clipping in the layout, ``before`` before clipping,
    ``expected`` after clipping in one process.
    """
    if np.array_equal(actual, before):
        return Diagnosis("a missed clip: these elements are as they were before clipping")
    factor = rounding.factor([actual], [expected])
    return Diagnosis(None, None if factor is None else f"clipped by {_times(factor)} the factor of one process")


def diagnose_update(actual: Array, before: Array, quantity: str) -> str | None:
    """Find the probable cause of values that differ after an update with the same gradient; None if unknown.

    ``actual`` and ``before`` have the differing elements in the layout, after and before the update.
    """
    if np.array_equal(actual, before):
        if quantity == "parameter":
            return "stale parameters: these elements have the values of the step before, the new ones never came"
        return "an update left out: these elements have the values of the step before"
    return None


def _repeated(right_again: bool, same_again: bool) -> str | None:
    if right_again:
        return (
            "stale data: the same batch evaluated once more gives the right numbers, so what ranks exchanged (a halo, "
            "the ring of a context group, gathered parameters) was of an earlier evaluation, or came too late"
        )
    if not same_again:
        return (
            "a model that is no function of parameters and batch: evaluated once more it gives other numbers again "
            "(a random generator with a state, a cache, a race)"
        )
    return None


def _computed(evidence: GradientEvidence) -> str | None:
    """Describe which ranks computed gradients that differ before the ranks' gradients are added up."""
    rounding, wrong = evidence.rounding, [one for one in evidence.computed if one.grains]
    if not evidence.computed:
        return "gradients of single ranks cannot be compared here: the owner of the elements is named"
    if not wrong:
        equal = "has the same bits as in one process" if rounding.tolerance is None else "agrees with one process"
        return f"what ranks computed {equal}, before it is added up: the owner of the elements, who adds it, is named"
    only = "only " if len(wrong) < len(evidence.computed) else ""
    grains = sorted({grain for one in wrong for grain in one.grains})
    some = ", ".join(map(str, grains[:6])) + (", ..." if len(grains) > 6 else "")
    text = f"{only}gradients that {_ranks(one.rank for one in wrong)} computed differ (of grains {some})"
    apart = max(one.largest for one in wrong)
    factors = [one.factor for one in wrong if one.factor is not None]
    if len(factors) == len(wrong) and max(factors) - min(factors) <= 2 * rounding.epsilon * abs(factors[0]):
        return f"{text}: all elements are {_times(factors[0])} those of one process"
    if apart <= rounding.of_sums:
        others = "another BLAS, processor or number of threads does that, too"
        return f"{text} by {apart:.1e} of the largest element at most, the size of rounding: {others}"
    return f"{text} by {apart:.1e} of the largest element at most"


def _tied(evidence: GradientEvidence) -> str | None:
    """Say which use of a tied parameter was added twice or left out; None if that does not explain the differences."""
    if not set(evidence.actual) <= set(evidence.uses):
        return None
    causes: set[str] = set()
    for name, actual in evidence.actual.items():
        expected, uses = evidence.expected[name], evidence.uses[name]
        extra = actual - expected
        match = [
            ("counted twice", use) for use, part in uses.items() if _is_part(extra, part, expected, evidence.rounding)
        ]
        match += [
            ("left out", use) for use, part in uses.items() if _is_part(extra, -part, expected, evidence.rounding)
        ]
        if not match and _is_part(extra, expected, expected, evidence.rounding):
            match = [("counted twice", "all uses")]
        if not match:
            return None
        causes.add(f"a tied gradient {match[0][0]}: the part of {match[0][1]!r}")
    return "; ".join(sorted(causes))


def _is_part(extra: Array, part: Array, full: Array, rounding: Rounding) -> bool:
    """Tell whether ``extra`` equals ``part``, one use's part of a gradient, and is no rounding error of ``full``.

    ``extra`` is the wrong gradient of a tied parameter minus ``full``, its gradient in one process.
    """
    size = largest(part)
    bound = max(rounding.of_sums, rounding.tolerance or 0.0) * max(size, largest(full))
    return size > 8 * bound and largest(extra - part) <= bound


def _skipped(evidence: GradientEvidence) -> bool:
    """Tell whether each wrong gradient is a sum over the samples of only the rank that updates the parameter."""

    def multiple(values: Mapping[str, Array], name: str) -> float | None:
        return evidence.rounding.factor([values[name]], [evidence.owner_sums[name]], keep_one=True, summed=True)

    return all(
        multiple(evidence.actual, n) is not None and multiple(evidence.expected, n) is None for n in evidence.actual
    )


def _wrong_count(what: str, factor: float, counts: Mapping[str, int], rounding: Rounding) -> Diagnosis:
    """Name the wrong count by which a sum was divided, if ``factor`` is one of ``counts``, an inverse or a ratio.

    An inverse is 1 divided by one of ``counts``, a ratio is one of them divided by another. Otherwise return a
    diagnosis without a cause, whose pattern gives the factor. ``factor`` is the found value divided by the right value;
    ``what`` is the value's name, such as "the loss".
    """
    pattern = f"{what} is {_times(factor)} what it must be"
    for size in sorted(set(counts.values()) - {1}):
        for times in (float(size), 1 / size):
            if rounding.ratio(factor, times):
                names = " and of ".join(name for name, count in counts.items() if count == size)
                right = f"{size} times too large" if times > 1 else f"{size} times too small"
                reason = f"{what} is {right}, and {size} is the number of {names}"
                return Diagnosis(f"a sum divided by the wrong count: {reason}")
    for (one, n), (other, m) in permutations(counts.items(), 2):
        if n % m and m % n and rounding.ratio(factor, n / m):
            reason = f"{what} is {n}/{m} of what it must be, {n} is the number of {one}, {m} that of {other}"
            return Diagnosis(f"a sum divided by the wrong count: {reason}")
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Diagnosis(None, f"{pattern}, which is no ratio of the counts here ({listed})")


def _with(diagnosis: Diagnosis, pattern: str | None) -> Diagnosis:
    """Return ``diagnosis`` with the text ``pattern`` appended to its field ``pattern``, after a semicolon."""
    return diagnosis._replace(pattern="; ".join(filter(None, (diagnosis.pattern, pattern))) or None)


def _times(factor: float) -> str:
    """Format a factor as text; a factor near 1 by its distance from 1, such as "1 + 0.0002 times"."""
    apart = factor - 1
    return f"1 {'+' if apart > 0 else '-'} {abs(apart):.3g} times" if 0 < abs(apart) < 1e-3 else f"{factor:.6g} times"


def _same_bits(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    return all(actual[name].tobytes() == expected[name].tobytes() for name in expected)


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
