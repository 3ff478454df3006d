"""Read layouts from their names, such as ``4``, ``zero3*4`` or ``pipeline=2, data=2``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES, chunk_stages
from mpizero.sharding.partition import TILED_AXES, Tiles, fits_tiles, within_rounding
from mpizero.train.config.components import STRATEGIES, ParallelSection

_SIZES = ("pipeline", "tensor", "context", "data", "tiles", "virtual_stages", "ranks_per_node")
_KEYS = (*_SIZES, "strategy", "schedule", "grain_assignment")
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
        given: dict[str, Any] = {}
        ranks = None
        for word in filter(None, (word.strip() for word in text.split(","))):
            found = re.fullmatch(r"(?:(\w+)\s*=\s*(\w+)|([a-z]\w*))?\s*(?:(?:^|\*)\s*(\d+))?", word)
            if found is None:
                raise ConfigError(f"layout {text!r}: {word!r} is not understood: {_ALLOWED}")
            key, value, name, number = found.groups()
            ranks = int(number) if number else ranks
            pairs = {key: value} if key else {} if name is None else _named(name)
            if pairs is None or not pairs.keys() <= {*_KEYS, "share_node_memory"} or pairs.keys() & given.keys():
                raise ConfigError(f"layout {text!r}: {word!r} is not understood, or given twice: {_ALLOWED}")
            given |= {k: int(v) if k in _SIZES and str(v).isdecimal() else v for k, v in pairs.items()}
        if not given and ranks is None:
            raise ConfigError(f"layout {text!r} is empty: {_ALLOWED}")
        try:
            parallel = ParallelSection(**{"strategy": strategy, "data": 1, **given})
            if ranks is not None:
                chosen = replace(parallel, data=given.get("data", -1))
                parallel = replace(chosen, data=chosen.axes(ranks).data)
        except ConfigError as error:
            raise ConfigError(f"layout {text!r}: {error}") from None
        return cls(parallel)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the layout."""
        return self.parallel.pipeline * self.parallel.tensor * self.parallel.context * self.parallel.data

    def in_tiles(self, tiles: Tiles) -> Layout:
        """Return the layout with ``tiles``, unless it has its own."""
        return self if self.parallel.tiles is not None else Layout(replace(self.parallel, tiles=tiles))

    def rounds(self, accumulate: int) -> bool:
        """Tell whether the layout's results can only be compared within rounding, whatever the model."""
        return bool(within_rounding(self.parallel.parallel_layout(), None, accumulate=accumulate))

    @property
    def alone(self) -> Layout:
        """The layout of one process with whose results this one is compared: with the same tiles, where it can."""
        tiles = self.parallel.tiles
        if tiles is None:
            sizes = {axis: getattr(self.parallel, axis) for axis in TILED_AXES}
            tiles = {axis: size for axis, size in sizes.items() if size > 1 and fits_tiles(1, size)} or None
        return ONE_PROCESS.in_tiles(tiles)

    def __str__(self) -> str:
        parallel = self.parallel
        words = [
            f"{name}={size}" for name in ("pipeline", "tensor", "context") if (size := getattr(parallel, name)) > 1
        ]
        head = f"{parallel.strategy}*{self.ranks}"
        if words and parallel.data > 1:
            words.append(f"data={parallel.data}")
        if parallel.pipeline > 1:
            words.append(f"schedule={parallel.schedule}")
            if parallel.virtual_stages > 1:
                words.append(f"virtual_stages={parallel.virtual_stages}")
        if parallel.ranks_per_node is not None:
            words.append(f"ranks_per_node={parallel.ranks_per_node}")
        if isinstance(parallel.tiles, int):
            words.append(f"tiles={parallel.tiles}")
        if parallel.grain_assignment != "static":
            words.append(f"grain_assignment={parallel.grain_assignment}")
        if not parallel.share_node_memory:
            words.append("private")
        return ", ".join([head, *words])

    def group_sizes(self) -> dict[str, int]:
        """Return the sizes of the layout that are above 1, by what they count, such as "replicas"."""
        parallel = self.parallel
        sizes = {
            "ranks": self.ranks,
            "replicas": parallel.data,
            "ranks of a tensor group": parallel.tensor,
            "ranks of a context group": parallel.context,
            "pipeline stages": parallel.pipeline,
        }
        return {name: size for name, size in sizes.items() if size > 1}


#: The layout of one process, with which all layouts are compared.
ONE_PROCESS = Layout(ParallelSection(strategy="ddp", data=1))


def _named(word: str) -> dict[str, Any] | None:
    if word == "private":
        return {"share_node_memory": False}
    return {"strategy": word} if word in STRATEGIES else None


def parse_layouts(text: str, strategy: str) -> list[Layout]:
    """Read layouts separated by semicolons; ``strategy`` is used for layouts without a strategy."""
    return [Layout.parse(part, strategy) for part in text.split(";") if part.strip()]


def each_once(layouts: Iterable[Layout], tiles: Tiles) -> list[Layout]:
    """Return the layouts with ``tiles``, unless they have their own; of several of one name the first.

    Not collective. Settings that no name has make no second layout: most change nothing in a comparison (``bucket_mb``,
    or ``schedule`` without a pipeline); ``order`` and ``cuts`` of the first are kept.
    """
    found: dict[str, Layout] = {}
    for layout in layouts:
        placed = layout.in_tiles(tiles)
        found.setdefault(str(placed), placed)
    return list(found.values())


def default_layouts(ranks: int, *, blocks: int, heads: int = 1, sequence: int = 0) -> list[Layout]:
    """Return the layouts that are compared by default: all strategies, pipelines, a tensor and a context group.

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
    """
    layouts = [ParallelSection(strategy=strategy, data=ranks) for strategy in STRATEGIES]
    layouts += [
        ParallelSection(strategy=strategy, data=ranks, share_node_memory=False)
        for strategy in ("ddp", "zero3")
        if ranks > 1
    ]
    layouts += _pipelines(ranks, blocks)
    tensor = _largest(ranks, lambda n: heads % n == 0)
    context = _largest(ranks, lambda n: 2 * n <= sequence)
    if tensor > 1:
        layouts.append(ParallelSection(strategy="zero1", tensor=tensor, data=ranks // tensor))
    if context > 1:
        layouts.append(ParallelSection(strategy="zero1", context=context, data=ranks // context))
    return [Layout(parallel) for parallel in layouts]


def _pipelines(ranks: int, blocks: int) -> Iterator[ParallelSection]:
    """Yield a layout with a pipeline for every possible number of stages; schedules and strategies alternate."""
    place = 0
    schedules = ("1f1b", *(name for name in SCHEDULES if name != "1f1b"))
    for stages in (n for n in range(2, ranks + 1) if ranks % n == 0):
        first = place % len(schedules)
        for schedule in (*schedules[first:], *schedules[:first]):
            virtual = 2 if schedule == "interleaved" else 1
            if len(chunk_stages(schedule, stages, virtual)) <= blocks:
                yield ParallelSection(
                    strategy=STRATEGIES[place % len(STRATEGIES)],
                    pipeline=stages,
                    data=ranks // stages,
                    schedule=schedule,
                    virtual_stages=virtual,
                )
                place += 1
                break


def _largest(ranks: int, fits: Any) -> int:
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and (n == 1 or fits(n)))
