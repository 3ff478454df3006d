"""Write the figures of a run for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpizero._util.checks import require, whole
from mpizero.errors import UnsupportedError
from mpizero.sharding import StepReport
from mpizero.train.callbacks.callback import Callback


class TensorBoard(Callback):
    """Write all numbers of each step and each validation as scalars for TensorBoard, on rank 0 (extra ``tensorboard``).

    After a resume, TensorBoard hides what an interrupted run has written for the steps that are repeated.

    Parameters
    ----------
    folder : path or None
        Folder of the event files; None is ``tensorboard`` in the run's folder.
    every : int
        Steps are written whose number is a multiple of this; validations always are.

    Raises
    ------
    UnsupportedError
        In the first step, on every rank, if ``tensorboardX`` is not installed.

    Examples
    --------
    >>> import mpizero as mz
    >>> board = mz.TensorBoard("events", every=10)  # for Trainer(..., callbacks=[board])
    >>> isinstance(board, mz.Callback)
    True
    >>> mz.TensorBoard(every=0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: TensorBoard: every=0: expected a whole number >= 1
    """

    def __init__(self, folder: str | Path | None = None, *, every: int = 1) -> None:
        self._folder = None if folder is None else os.path.abspath(folder)
        self._every = require("TensorBoard: every", every, whole(1))
        self._writer: Any = None

    def on_step(self, trainer: Any, report: StepReport) -> None:
        """Write the figures of a step."""
        if trainer.rank == 0 and trainer.step % self._every == 0:
            self._write(trainer, trainer.figures)

    def on_validation(self, trainer: Any, figures: Mapping[str, float | None]) -> None:
        """Write the figures of a validation."""
        if trainer.rank == 0:
            self._write(trainer, figures)

    def on_end(self, trainer: Any, result: Any) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, trainer: Any, figures: Mapping[str, Any]) -> None:
        if self._writer is None:
            folder = trainer.run / "tensorboard" if self._folder is None else self._folder
            self._writer = _event_writer(str(folder), trainer.step)
        for name, value in figures.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, trainer.step)


def _event_writer(folder: str, step: int) -> Any:
    """Open an event file; what older ones in ``folder`` hold of ``step`` and later steps is hidden."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UnsupportedError(
            "TensorBoard needs tensorboardX, which is not installed: pip install mpizero[tensorboard]"
        ) from None
    return SummaryWriter(folder, purge_step=step)
