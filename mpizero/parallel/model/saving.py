"""Save and load a sharded model: folders, bytes, open files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray, PendingSave, SnapshotBuffer
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.calls import collective, recorded
from mpizero.crc import crc32
from mpizero.parallel.checkpointing import learning_rate, model_state
from mpizero.parallel.checkpointing.restore import opened_alike
from mpizero.parallel.gradients.average import mean_over_ranks
from mpizero.parallel.model.core import ShardedCore
from mpizero.text import notice


class Saving(ShardedCore):
    """Write and read parameters and optimizer state. Collective, where nothing else is said."""

    _saving: PendingSave | None = None
    _snapshot: SnapshotBuffer | None = None
    #: The checkpoint that was loaded without the optimizer state in it.
    _unread = ""

    def checkpoint_arrays(self) -> list[LocalArray]:
        """Return this rank's owned ranges of parameters and optimizer state, as views (of a copy of what a GPU holds).

        Not collective, except for a model that trains by local steps: the mean of the ranks' parameters, with the
        optimizer state of rank 0.
        """
        if self._mean_every:
            self._check_call("checkpoint_arrays")
        mean = mean_over_ranks(self._config.communicator, self.engine.store.values) if self._mean_every else None
        return self._written(model_state.local_arrays(self.engine, values=mean))

    def optimizer_arrays(self) -> list[LocalArray]:
        """Return this rank's owned ranges of the optimizer state, as views (or of a GPU's copy). Not collective."""
        return self._written(model_state.local_arrays(self.engine, parameters=False))

    def checkpoint_attributes(self) -> dict[str, Any]:
        """Return what a checkpoint must know besides arrays; collective where ``checkpoint_arrays`` is."""
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
        """Take parameters and optimizer state from an open checkpoint, as safe as :meth:`load_model`."""
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
        alignment: int = checkpoint.ALIGNMENT,
    ) -> None:
        """Write parameters and optimizer state to the folder ``path``, in place of a checkpoint that was there.

        Parameters
        ----------
        path : path
            The checkpoint; rank 0's path counts, and it says so where others differ. A save begun before is finished
            first.
        attributes : dict, optional
            More JSON values to keep beside the arrays, the same on every rank; see ``checkpoint.Reader.attributes``.
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
        alignment: int = checkpoint.ALIGNMENT,
    ) -> PendingSave:
        """Start to save like :meth:`save_model`, and return as soon as the values are copied: training may go on.

        The checkpoint appears with ``commit()`` of what is returned, which every rank calls at the same place of its
        program, best when ``finished`` is true on all. The next save, and closing the model, commit by themselves; a
        ``with`` block of the model that an error ends discards. One copy of what this rank saves is kept for the next
        time.
        """
        self._finish_save()
        _tell_paths(self._config.communicator, "begin_save", path)
        self.reserve_snapshot()
        arrays, found = self.checkpoint_arrays(), self.checkpoint_attributes() | dict(attributes or {})
        comm, buffer = self._config.communicator, self._snapshot
        self._saving = checkpoint.begin(path, arrays, found, comm, buffer=buffer, replace=replace, alignment=alignment)
        return self._saving

    def reserve_snapshot(self) -> None:
        """Make room for the copy of :meth:`begin_save` now, so that its first call takes no longer than the others.

        Not collective.
        """
        memory = self.engine.memory
        if self._snapshot is None:
            self._snapshot = SnapshotBuffer(
                lambda nbytes: memory.private("snapshot", nbytes, np.uint8),
                lambda room: memory.release("snapshot", room),
            )
        self._snapshot.reserve(self._written(model_state.local_arrays(self.engine, fetch=False)))

    @collective
    def finish_save(self) -> None:
        """Commit the save that :meth:`begin_save` has started, if there is one that has not ended."""
        self._finish_save()

    def _finish_save(self) -> None:
        pending, self._saving = self._saving, None
        if pending is not None and not pending.ended:
            pending.commit()

    def _on_before_close(self) -> None:
        """Finish a save that was begun."""
        try:
            self._finish_save()
        finally:
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model; an error leaves it on this rank only, without the save that was begun."""
        if error is not None and self._saving is not None:
            self._saving.discard()
        super().__exit__(kind, error, trace)

    @collective
    def load_model(self, path: str | Path, *, strict_layout: bool = False) -> None:
        """Read what ``save_model`` wrote, on any number of ranks and any strategy; rank 0's path counts.

        Without an optimizer only the parameters are read: bind it first to go on where a training ended.
        Everything is verified before it counts: where this raises, parameters and optimizer state are as before. A
        model in use with many parameters reads twice for that. Should a file be readable the first time and not the
        second, when parts of it have taken their place, the model refuses to be used, on every rank alike, until
        this or another checkpoint has been loaded whole.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        CheckpointError
            On damage or another model, naming file, array and reason; with ``strict_layout`` also on another layout.
        """
        _tell_paths(self._config.communicator, "load_model", path)
        with checkpoint.open_checkpoint(path, self._config.communicator) as reader:
            model_state.restore(engine := self.loadable_engine, reader, strict_layout=strict_layout)
            left = engine.updater is None and reader.attributes.get("mpizero", {}).get("optimizer")
        self._unread = str(path) if left else ""
        self._pending = None
        self.invalidate_cache()

    def tell_unread(self) -> None:
        """Say on rank 0 that an optimizer begins without the state that was in a checkpoint. Not collective."""
        if self._unread and self.rank == 0:
            notice(
                f"the optimizer begins anew: its state in {self._unread} was not read, for the "
                "model had no optimizer yet; to go on where that training ended, give the model its optimizer, or call "
                "set_model, before load_model"
            )
        self._unread = ""

    @collective
    def serialize(self) -> bytes:
        """Return parameters and optimizer state as an HDF5 image, the same bytes on every rank."""
        return checkpoint.to_bytes(self.checkpoint_arrays(), self.checkpoint_attributes(), self._config.communicator)

    @recorded
    def deserialize(self, data: bytes) -> None:
        """Take what ``serialize`` returned; ``data`` is the same on every rank. As safe as :meth:`load_model`."""
        with opened_alike(self._config.communicator, "deserialize", data) as reader:
            self.restore_arrays(reader)

    @collective
    def save_state(self, file: IO[bytes]) -> None:
        """Write :meth:`serialize`'s bytes to an open binary file (of rank 0; the others may pass any)."""
        data = self.serialize()
        with all_ranks(self._config.communicator):
            if self.rank == 0:
                file.write(data)
                file.flush()

    @collective
    def load_state(self, file: IO[bytes]) -> None:
        """Read what ``save_state`` wrote, from an open binary file of each rank."""
        with all_ranks(self._config.communicator):
            data = file.read()
        self.deserialize(data)


def _tell_paths(comm: Communicator, call: str, path: Any) -> None:
    """Say on rank 0 that other ranks name another path, which does not count. Collective."""
    mine = np.array([crc32(repr(path).encode())], np.int64)
    table = np.empty(comm.size, np.int64)
    comm.allgather(mine, table, "path")
    if (table != table[0]).any():
        paths = comm.allgather_object(str(path), "path")
        rank = int(np.flatnonzero(table != table[0])[0])
        if comm.rank == 0:
            notice(f"{call}: rank 0's path counts, {paths[0]!r}; rank {rank} has given {paths[rank]!r}")
