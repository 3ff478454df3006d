"""Read layouts from short names: ``4``, ``zero3*4``, ``pipeline=2, data=2``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES, chunk_stages
from mpizero.train.config.parallel_section import STRATEGIES, ParallelSection

_SIZES = ("pipeline", "tensor", "context", "data", "virtual_stages", "ranks_per_node")
_KEYS = (*_SIZES, "strategy", "schedule")
_ALLOWED = (
    f"expected a number of ranks, {', '.join(STRATEGIES)} (with *N: on N ranks), {', '.join(_KEYS)} as key=value, "
    "or private, separated by commas"
)


@dataclass(frozen=True)
class Layout:
    """Describe how one of the compared trainings is laid out over ranks.

    Attributes
    ----------
    parallel : ParallelSection
        Its ``data`` is a number of replicas.
    """

    parallel: ParallelSection

    @classmethod
    def parse(cls, text: str, strategy: str = "zero2") -> Layout:
        """Read one layout; ``strategy`` is that of a text which names none.

        Not collective.

        Raises
        ------
        ConfigError
            Naming the layout, the word and what is allowed.
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
        """Return how many ranks it takes."""
        return self.parallel.pipeline * self.parallel.tensor * self.parallel.context * self.parallel.data

    @property
    def rounds(self) -> bool:
        """Tell whether it adds in another order than one process, and so agrees within rounding only."""
        return self.parallel.tensor * self.parallel.context > 1

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
        if not parallel.share_node_memory:
            words.append("private")
        return ", ".join([head, *words])

    def group_sizes(self) -> dict[str, int]:
        """Return the sizes of groups with more than one rank, with what each is the number of. Not collective."""
        parallel = self.parallel
        sizes = {
            "ranks": self.ranks,
            "replicas": parallel.data,
            "ranks of a tensor group": parallel.tensor,
            "ranks of a context group": parallel.context,
            "pipeline stages": parallel.pipeline,
        }
        return {name: size for name, size in sizes.items() if size > 1}


#: One process, which all layouts are compared with.
ONE_PROCESS = Layout(ParallelSection(strategy="ddp", data=1))


def _named(word: str) -> dict[str, Any] | None:
    if word == "private":
        return {"share_node_memory": False}
    return {"strategy": word} if word in STRATEGIES else None


def parse_layouts(text: str, strategy: str) -> list[Layout]:
    """Read layouts separated by semicolons.

    Not collective.
    """
    return [Layout.parse(part, strategy) for part in text.split(";") if part.strip()]


def default_layouts(ranks: int, *, blocks: int, heads: int = 1, sequence: int = 0) -> list[Layout]:
    """Return every strategy on all ranks, and every way to cut the model that they allow.

    Not collective.

    Parameters
    ----------
    ranks : int
        How many there are.
    blocks : int
        Of the model: the most stages of a pipeline.
    heads : int
        That a tensor group must divide; 1 leaves tensor groups out.
    sequence : int
        Length that a context group cuts; 0 leaves context groups out.
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
    """Yield a pipeline for every divisor of the ranks, with schedules and strategies in turn."""
    place = 0
    for stages in (n for n in range(2, ranks + 1) if ranks % n == 0):
        for schedule in _turned(("1f1b", *(name for name in SCHEDULES if name != "1f1b")), place):
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


def _turned(names: Sequence[str], by: int) -> Sequence[str]:
    by %= len(names)
    return (*names[by:], *names[:by])


def _largest(ranks: int, fits: Any) -> int:
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and (n == 1 or fits(n)))
