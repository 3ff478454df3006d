"""Measure the rate of matrix products with the shapes that a transformer's layers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpizero._util.checks import whole
from mpizero._util.text import Measurement
from mpizero.comm import Communicator
from mpizero.errors import ConfigError
from mpizero.kernels.matmul import matmul
from mpizero.layout import GrainRule
from mpizero.nn import GPT
from mpizero.nn.models import efficient_samples
from mpizero.planning.machine_file import MatrixProduct
from mpizero.train.bench.rounds import alone, together
from mpizero.train.config.build import build_source, with_batch
from mpizero.train.config.checks import check_option, shown
from mpizero.train.config.components import GptSection, VectorMethodSection
from mpizero.train.config.schema import Config
from mpizero.types import Array

#: Queries in one product of attention; :mod:`mpizero.nn.transformer` cuts them into blocks of this size.
_QUERIES = 64
_VOCABULARY = 256
#: A product is repeated until about ``_OPERATIONS`` operations are done, at most ``_MOST`` times: a single small one is
#: too short to time.
_OPERATIONS, _MOST = 2e8, 100
FORMS = ("forward", "input", "weights")


@dataclass(frozen=True)
class ProductShapes:
    """Hold the sizes of a transformer that determine the shapes of its matrix products.

    Attributes
    ----------
    dim, heads, sequence, batch : int
        Number of features, of attention heads, of tokens in a sample, and of samples in a micro-batch.
    dtype : str
        "float32" or "float64".
    """

    dim: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes below 1, and if the number of heads does not divide the number of features."""
        for name in ("dim", "heads", "sequence", "batch"):
            check_option(f"--{name}", getattr(self, name), whole(1))
        if self.dim % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --dim {self.dim}")

    @classmethod
    def of(cls, config: Config) -> ProductShapes:
        """Return the sizes of a configuration's transformer and its micro-batches. Not collective.

        The data are opened only for a method of whole vectors, whose batch are all samples.

        Raises
        ------
        ConfigError
            If the configuration's model is not a transformer.
        """
        section, train = config.model, config.train
        if not isinstance(section, GptSection):
            raise ConfigError(
                f'the model is {shown(section.described)}: bench machine takes the shapes of a "gpt"; give --dim'
            )
        gpt = GPT(section.dim, section.layers, section.heads, section.sequence, vocabulary=_VOCABULARY)
        rule = GrainRule(train.micro_batch, train.accumulate, efficient_samples(gpt))
        if isinstance(config.optimizer, VectorMethodSection):
            train = with_batch(config, build_source(config)[0]).train
        batch = rule.micro_size(train.global_batch)
        return cls(section.dim, section.heads, section.sequence, batch, section.dtype)

    def linear(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, number of inputs and number of outputs of each linear map of a block. Not collective."""
        yield "qkv", self.dim, 3 * self.dim
        yield "projection", self.dim, self.dim
        yield "expand", self.dim, 4 * self.dim
        yield "contract", 4 * self.dim, self.dim


@dataclass
class _Timed:
    """Time one matrix product: hold its description, the call that computes it, and the seconds measured so far."""

    facts: dict[str, Any]
    operations: int
    call: Callable[[], object]
    one: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)

    @property
    def times(self) -> int:
        """Return how often the product is computed in one measurement; more often if it is small."""
        return max(1, min(_MOST, round(_OPERATIONS / self.operations)))

    def work(self) -> None:
        """Compute the product :attr:`times` times. Not collective."""
        for _ in range(self.times):
            self.call()

    def figure(self) -> MatrixProduct:
        """Return the measured seconds of computing the product once. Not collective."""
        one, every = (Measurement.of([s / self.times for s in values]) for values in (self.one, self.every))
        return MatrixProduct(**self.facts, one=one, every=every)


class ProductBenchmark:
    """Time the matrix products of one transformer block and of the output head, as the layers compute them.

    For linear maps these are the products of the forward pass, of the gradients of inputs and of the gradients of
    weights; for attention, those of the forward pass.

    Construction is not collective; :meth:`measure` is.
    """

    def __init__(self, comm: Communicator, shapes: ProductShapes) -> None:
        self.comm, self.shapes = comm, shapes
        self.dtype = np.dtype(shapes.dtype)
        self.random = np.random.default_rng(comm.rank)
        self.timed: Sequence[_Timed] = (*self._linear(), *self._attention())

    def _array(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(self.dtype)

    def _linear(self) -> Iterator[_Timed]:
        rows = self.shapes.batch * self.shapes.sequence
        for name, inputs, outputs in (*self.shapes.linear(), ("head", self.shapes.dim, _VOCABULARY)):
            x, weight, dy = self._array(rows, inputs), self._array(inputs, outputs), self._array(rows, outputs)
            facts = {"name": name, "batch": 1, "linear": name != "head"}
            forms = {
                "forward": (x, weight, np.empty_like(dy)),
                "input": (dy, weight.T, np.empty_like(x)),
                "weights": (x.T, dy, np.empty_like(weight)),
            }
            for form in FORMS:
                yield self._one({**facts, "form": form}, *forms[form])

    def _attention(self) -> Iterator[_Timed]:
        """Yield timers of attention's two batched products, of one block of queries.

        They are the products of queries and keys, and of attention weights and values.
        """
        batch, width = self.shapes.batch * self.shapes.heads, self.shapes.dim // self.shapes.heads
        queries, length = min(_QUERIES, self.shapes.sequence), self.shapes.sequence
        q, k = self._array(batch, queries, width), self._array(batch, length, width)
        seen, mixed = np.empty((batch, queries, length), self.dtype), np.empty((batch, queries, width), self.dtype)
        facts = {"form": "forward", "linear": False}
        yield self._one({**facts, "name": "scores", "batch": batch}, q, k.swapaxes(1, 2), seen)
        yield self._one({**facts, "name": "mixing", "batch": batch}, self._array(*seen.shape), k, mixed)

    @staticmethod
    def _one(facts: dict[str, Any], a: Array, b: Array, out: Array) -> _Timed:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        sizes = {"rows": rows, "inner": inner, "columns": columns}
        return _Timed(facts | sizes, 2 * facts["batch"] * rows * inner * columns, lambda: matmul(a, b, out))

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every product on one rank and on all ranks, in reverse order if ``turn`` is -1.

        Collective. The seconds are stored only with ``keep``. Make the first call without it: it warms up.
        """
        for timed in self.timed[::turn]:
            for how, values in ((alone, timed.one), (together, timed.every))[::turn]:
                took = how(self.comm, timed.work)
                values.extend([took] * keep)

    def figures(self) -> tuple[MatrixProduct, ...]:
        """Return the stored seconds of every product. Not collective."""
        return tuple(timed.figure() for timed in self.timed)
