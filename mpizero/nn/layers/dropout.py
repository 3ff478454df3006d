"""Apply dropout whose mask depends on the sample's index in the global batch, never on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero import kernels
from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero.nn.arrays import namespace, require_floats, vector
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer
from mpizero.nn.sample_part import SamplePart
from mpizero.nn.settings import require_rate
from mpizero.types import EVALUATE, Array, Params, Pieces, Run


@explains
@dataclass(frozen=True)
class Dropout(Layer):
    """Zero each element with probability ``rate`` and scale the others by ``1 / (1 - rate)``, in training only.

    The mask is drawn by Philox with key (``run.seed``, ``site``, ``run.step``) and counter (index of the sample in the
    global batch, element within the sample). So the mask is the same however a batch is cut over ranks or
    micro-batches, and when a forward pass is repeated (Srivastava et al., *Dropout*, 2014). No method is collective.

    Parameters
    ----------
    rate : float
        Probability with which an element becomes 0, from 0 to less than 1. Inputs are (samples, ...), float32 or
        float64.
    site : int
        Number that keys the mask. It must be unique within a model; otherwise two dropouts use the same mask.

    Raises
    ------
    ConfigError
        If ``rate`` or ``site`` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.types import Run
    >>> dropout, x = mz.nn.Dropout(0.5, site=3), np.ones((1, 6))
    >>> y, cache = dropout.forward({}, x, Run(training=True, seed=1, step=7))
    >>> y
    array([[2., 0., 0., 2., 0., 0.]])
    >>> dropout.forward({}, x)[0] is x  # outside of training
    True
    """

    rate: float
    site: int = 0

    def __post_init__(self) -> None:
        require_rate("Dropout", self.rate)
        require("Dropout: site", self.site, whole())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, ...) with the mask applied, or ``x`` itself if not in training; and the cache."""
        require_floats(x, "Dropout")
        if not self.drops(x, run):
            return x, None
        return self.mask(x, run), run

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` with the forward pass's mask, which is drawn again, and None."""
        return (dy if cache is None else self.mask(dy, cache)), None

    def drops(self, x: Array, run: Run) -> bool:
        """Tell whether elements of ``x`` may be dropped: in training, if ``rate`` is not 0 and ``x`` is not empty."""
        return run.training and self.rate > 0.0 and x.size > 0

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Return a copy of ``x`` (samples, ...) with the mask applied.

        If ``window`` is given, ``x`` holds only that part of each sample; its elements get the mask that they have in
        the whole sample. The backward pass calls this function with ``dy``.
        """
        xp = namespace(x)
        x = xp.ascontiguousarray(x)
        y: Array = xp.empty_like(x)
        per_sample = x.size // x.shape[0]
        kernels.backend(x).random.dropout(
            x.reshape(-1),
            y.reshape(-1),
            vector(x, self.rate),
            run.seed,
            self.site,
            run.step,
            run.first_sample,
            per_sample,
            *(window or SamplePart(0, per_sample)),
        )
        return y

    def mask_pieces(self, x: Array, run: Run, pieces: Pieces) -> Array:
        """Return a copy of ``x`` (samples, positions, ...) with the mask applied; ``x`` must not be empty.

        ``pieces`` says where the positions lie in the whole sequences, as :meth:`mpizero.types.Run.pieces` returns it.
        The backward pass calls this function with ``dy``.
        """
        width = x.size // (x.shape[0] * x.shape[1])
        parts = [SamplePart(there.start * width, (there.stop - there.start) * width) for _, there in pieces]
        low, high = parts[0], parts[-1]
        if len(parts) <= 2 and low.width == high.width:  # all at once, without a copy
            return self.mask(x, run, low._replace(rows=len(parts), row_step=high.offset - low.offset))
        masked = [self.mask(x[:, here], run, part) for (here, _), part in zip(pieces, parts, strict=True)]
        y: Array = namespace(x).concatenate(masked, axis=1)
        return y

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add a dropout node to the exported computation graph if the rate is not 0; return the output."""
        return graph.add_layer(self, name, source, source.shape) if self.rate else source
