"""Save and load a sharded model: as a checkpoint folder, as bytes, or in an open file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mpizero import checkpoint
from mpizero._util.text import crc32, notice
from mpizero.checkpoint.format import ALIGNMENT
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, collective, recorded
from mpizero.comm.reduce import mean_over_ranks
from mpizero.parallel.checkpointing import learning_rate, model_state
from mpizero.parallel.checkpointing.restore import opened_alike
from mpizero.parallel.model.core import ShardedCore

if TYPE_CHECKING:
    from mpizero.checkpoint import LocalArray, PendingSave, SnapshotBuffer
    from mpizero.parallel.checkpointing.chosen_parameters import LoadReport


class Saving(ShardedCore):
    """Save and load parameters and optimizer state. Methods are collective unless they say otherwise."""

    _saving: PendingSave | None = None
    _snapshot: SnapshotBuffer | None = None
    #: Path of the loaded checkpoint whose optimizer state was not loaded, because no optimizer was bound; else "".
    _unread = ""

    def checkpoint_arrays(self) -> list[LocalArray]:
        """Return the ranges of parameters and optimizer state that this rank saves: views, or copies from a GPU.

        Not collective, except with local SGD. Then rank 0 saves the mean of all ranks' parameters and its own optimizer
        state, and the other ranks save nothing.
        """
        if self._mean_every:
            self._check_call("checkpoint_arrays")
        mean = mean_over_ranks(self._config.communicator, self.engine.store.values) if self._mean_every else None
        return self._written(model_state.local_arrays(self.engine, values=mean))

    def optimizer_arrays(self) -> list[LocalArray]:
        """Return the ranges of the optimizer state that this rank saves: views, or copies from a GPU.

        Not collective.
        """
        return self._written(model_state.local_arrays(self.engine, parameters=False))

    def checkpoint_attributes(self) -> dict[str, Any]:
        """Return the values to save beside the arrays: step count, optimizer, layout, learning rate.

        Collective only with local SGD.
        """
        if self._mean_every:
            self._check_call("checkpoint_attributes")
        found = {
            "mpizero": model_state.attributes(self.engine),
            learning_rate.ATTRIBUTE: learning_rate.recorded(self.engine.updater),
        }
        return self._config.communicator.broadcast_object(found) if self._mean_every else found

    def _written(self, arrays: list[LocalArray]) -> list[LocalArray]:
        return arrays if self.rank == 0 or not self._mean_every else [replace(a, pieces=()) for a in arrays]

    @collective
    def restore_arrays(self, reader: Any) -> None:
        """Restore parameters and optimizer state from an open checkpoint; errors are as for :meth:`load_model`."""
        model_state.restore(self.loadable_engine, reader)
        self._pending = None
        self.invalidate_cache()

    @collective
    def save_model(
        self,
        path: str | Path,
        *,
        attributes: Mapping[str, Any] | None = None,
        backend: str = "direct",
        replace: bool = True,
        alignment: int = ALIGNMENT,
    ) -> None:
        """Save parameters and optimizer state as a checkpoint folder; by default an existing checkpoint is replaced.

        Parameters
        ----------
        path : path
            The checkpoint folder. The path of rank 0 is used; rank 0 prints a notice if other ranks pass another path.
            A save that ``begin_save`` has started is committed first.
        attributes : dict, optional
            JSON values to save beside the arrays, the same on every rank. ``checkpoint.Reader.attributes`` returns them
            again.
        backend, replace, alignment
            As for :func:`mpizero.checkpoint.write`.
        """
        self._finish_save()
        arrays, found = self.checkpoint_arrays(), self.checkpoint_attributes() | dict(attributes or {})
        comm = self._config.communicator
        _tell_paths(comm, "save_model", path)
        checkpoint.write(path, arrays, found, comm, backend, replace, alignment=alignment)

    @collective
    def begin_save(
        self,
        path: str | Path,
        *,
        attributes: Mapping[str, Any] | None = None,
        replace: bool = True,
        alignment: int = ALIGNMENT,
    ) -> PendingSave:
        """Start a save like :meth:`save_model`, and return as soon as the values are copied: training can go on.

        A thread writes the copy. The checkpoint appears when every rank calls ``commit()`` of the returned object, a
        collective call that is short once ``finished`` is true on all ranks. The next save commits this one, too, and
        so does closing the model. If an exception ends the ``with`` block of the model, the save is discarded. The
        memory for the copy is kept for the next save.
        """
        self._finish_save()
        _tell_paths(self._config.communicator, "begin_save", path)
        self.reserve_snapshot()
        arrays, found = self.checkpoint_arrays(), self.checkpoint_attributes() | dict(attributes or {})
        comm, buffer = self._config.communicator, self._snapshot
        self._saving = checkpoint.begin(path, arrays, found, comm, buffer=buffer, replace=replace, alignment=alignment)
        return self._saving

    def reserve_snapshot(self) -> None:
        """Allocate the memory for the copy of :meth:`begin_save` now, so that its first call is as fast as later ones.

        Not collective.
        """
        memory = self.engine.memory
        if self._snapshot is None:
            self._snapshot = checkpoint.SnapshotBuffer(
                lambda nbytes: memory.private("snapshot", nbytes, np.uint8),
                lambda room: memory.release("snapshot", room),
            )
        self._snapshot.reserve(self._written(model_state.local_arrays(self.engine, fetch=False)))

    @collective
    def finish_save(self) -> None:
        """Commit the save that :meth:`begin_save` has started, if it was not committed or discarded already."""
        self._finish_save()

    def _finish_save(self) -> None:
        pending, self._saving = self._saving, None
        if pending is not None and not pending.ended:
            pending.commit()

    def _on_before_close(self) -> None:
        """Commit a save that :meth:`begin_save` has started, and free the memory for its copy."""
        try:
            self._finish_save()
        finally:
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the model; after an exception, discard a save that :meth:`begin_save` has started."""
        if error is not None and self._saving is not None:
            self._saving.discard()
        super().__exit__(kind, error, trace)

    @collective
    def load_model(self, path: str | Path, *, strict_layout: bool = False) -> None:
        """Load a checkpoint that ``save_model`` wrote with any strategy on any number of ranks; rank 0's path is used.

        A model without an optimizer loads only the parameters: to continue a training, bind the optimizer first. All
        values are verified before any is replaced. So if an error is raised, parameters and optimizer state are
        unchanged. To make this possible, a large model that has been trained reads the file twice. If the second
        reading fails after some values were replaced, every use of the model on any rank raises CheckpointError until a
        checkpoint has been loaded completely.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        CheckpointError
            If the checkpoint is damaged or of another model. The message names file, array and reason. With
            ``strict_layout=True`` also if the checkpoint was written with another strategy or other numbers of ranks.
        """
        _tell_paths(self._config.communicator, "load_model", path)
        with checkpoint.open_checkpoint(path, self._config.communicator) as reader:
            model_state.restore(engine := self.loadable_engine, reader, strict_layout=strict_layout)
            left = engine.updater is None and reader.attributes.get("mpizero", {}).get("optimizer")
        self._unread = str(path) if left else ""
        self._pending = None
        self.invalidate_cache()

    @collective
    def load_parameters(
        self,
        path: str | Path,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool | None = None,
    ) -> LoadReport:
        """Load parameters alone, all or those that fit patterns, from a file of any layout; return what was loaded.

        Optimizer state and the number of the step stay as they are. Each rank reads the ranges that it holds. All
        values are verified before any is replaced, as for :meth:`load_model`.

        Parameters
        ----------
        path : path
            A checkpoint, a run's folder, of which the newest checkpoint is taken, a safetensors file or an ``.npz``
            file of arrays by name. The path of rank 0 is used, and
            every rank must be able to read it. Floats of another type are converted; of an ``.npz`` file a rank holds
            one array at a time.
        include, exclude : str or sequence of str, optional
            Shell patterns of parameter names, such as ``"encoder.*"`` (``*`` stands for dots, too): what is loaded, by
            default everything, and what is not.
        rename : mapping of str to str, optional
            Names in the file and their names in the model; both may have one ``*``, which stands for the same text.
        strict : bool, optional
            Whether a chosen parameter that is missing from the file, or has another shape or type there, is an error;
            without patterns also a parameter that is in the file only. The default is True if no pattern is given.
            Otherwise such parameters keep their values; rank 0 prints which.

        Returns
        -------
        LoadReport
            The names that were taken, left, missing, of another shape, and in the file only. It prints as one line.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        ConfigError
            If a pattern fits nothing, or ranks choose differently.
        CheckpointError
            If the file is damaged, nothing of it can be loaded, or ``strict`` says so. The message names file,
            parameters and reason.
        """
        with all_ranks(self._config.communicator):  # also if the import fails on one of them
            from mpizero.parallel.checkpointing.chosen_parameters import Choice, load_chosen

            choice = Choice.of(include, exclude, rename, strict)
        report = load_chosen(self.loadable_engine, path, choice)
        self._pending = None
        self.invalidate_cache()
        if self.rank == 0 and report.told:
            notice(str(report))
        return report

    def tell_unread(self) -> None:
        """Print a notice on rank 0 if a checkpoint was loaded before the optimizer was bound. Not collective.

        The optimizer then begins without the state in that checkpoint.
        """
        if self._unread and self.rank == 0:
            notice(
                f"the optimizer begins anew: its state in {self._unread} was not read, for the "
                "model had no optimizer yet; to go on where that training ended, give the model its optimizer, or call "
                "set_model, before load_model"
            )
        self._unread = ""

    @collective
    def serialize(self) -> bytes:
        """Return parameters and optimizer state as the bytes of an HDF5 file, the same on every rank."""
        return checkpoint.to_bytes(self.checkpoint_arrays(), self.checkpoint_attributes(), self._config.communicator)

    @recorded
    def deserialize(self, data: bytes) -> None:
        """Load the bytes that ``serialize`` returned, the same on every rank; errors are as for :meth:`load_model`."""
        with opened_alike(self._config.communicator, "deserialize", data) as reader:
            self.restore_arrays(reader)

    @collective
    def save_state(self, file: IO[bytes]) -> None:
        """Write the bytes of :meth:`serialize` to an open binary file on rank 0; other ranks' ``file`` is ignored."""
        data = self.serialize()
        with all_ranks(self._config.communicator):
            if self.rank == 0:
                file.write(data)
                file.flush()

    @collective
    def load_state(self, file: IO[bytes]) -> None:
        """Load the bytes that ``save_state`` wrote; every rank passes an open binary file that contains them."""
        with all_ranks(self._config.communicator):
            data = file.read()
        self.deserialize(data)


def _tell_paths(comm: Communicator, call: str, path: Any) -> None:
    """Print a notice on rank 0 if another rank passes another path to method ``call``. Collective.

    Only the path of rank 0 is used.
    """
    mine = np.array([crc32(repr(path).encode())], np.int64)
    table = np.empty(comm.size, np.int64)
    comm.allgather(mine, table, "path")
    if (table != table[0]).any():
        paths = comm.allgather_object(str(path), "path")
        rank = int(np.flatnonzero(table != table[0])[0])
        if comm.rank == 0:
            notice(f"{call}: rank 0's path counts, {paths[0]!r}; rank {rank} has given {paths[rank]!r}")
