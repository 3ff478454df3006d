"""Save while training continues: copy the values, let a thread write the copy, and commit the checkpoint later.

:func:`begin` lets all ranks agree, copies the values into a :class:`SnapshotBuffer`, starts a :class:`WriterThread`,
and returns a :class:`PendingSave`. The caller may then change its arrays; :meth:`PendingSave.commit` makes the
checkpoint.

[Note: no MPI in the thread] The writing thread computes checksums, writes the values, and syncs the file to disk. It
never calls MPI. Only :func:`begin` and :meth:`PendingSave.commit` communicate, in the thread of their caller:
:func:`begin` lets all ranks agree on the arrays and the target before anything is written, and
:meth:`PendingSave.commit` lets them agree afterwards whether all have succeeded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from mpizero.checkpoint.atomic_folder import PieceSums, WritingStopped, agreed, open_state, write_pieces
from mpizero.checkpoint.format import ALIGNMENT, LocalArray
from mpizero.checkpoint.writer import KnownLayout, RepeatedSave, SavePlan, TemporaryFolder, make_plan, publish
from mpizero.comm import agreement
from mpizero.comm.communicator import Communicator
from mpizero.comm.startup import communicator_of
from mpizero.errors import StateError
from mpizero.guard.call_trace import CallTrace
from mpizero.kernels.memory import LINE, PAGE, copy_past_cache
from mpizero.types import Array


class SnapshotBuffer:
    """Hold the memory into which asynchronous saves copy their values; every save reuses it.

    No method is collective.

    Parameters
    ----------
    allocate : function, optional
        Function that is called with a number of bytes and returns a new uint8 array of that size. A caller that counts
        its memory passes its own function. The default is ``numpy.empty``.
    release : function, optional
        Function that is called with an array from ``allocate`` when the array is no longer used.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> buffer = checkpoint.SnapshotBuffer()
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2):  # both saves copy into the same memory
    ...         checkpoint.begin(f"{run}/{step}", [whole], {}, comm="self", buffer=buffer).commit()
    >>> buffer.nbytes >= weight.nbytes
    True
    """

    def __init__(
        self, allocate: Callable[[int], Array] | None = None, release: Callable[[Array], object] | None = None
    ) -> None:
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._release = release or (lambda memory: None)  # Python frees an array that is no longer used
        self._memory: Array = np.empty(0, np.uint8)
        self._until_read: Callable[[], object] | None = None
        #: Layout of the last save through this buffer.
        self.layout = KnownLayout()

    @property
    def nbytes(self) -> int:
        """Number of bytes that the buffer has allocated."""
        return self._memory.size

    def reserve(self, arrays: Sequence[LocalArray]) -> None:
        """Allocate memory for all values in ``arrays`` now, so that the first save is as fast as later saves."""
        needed = sum(_padded(values.nbytes) for array in arrays for _, values in array.pieces)
        if needed and needed + LINE > self._memory.size:
            self.close()  # release the old memory before the new memory is allocated
            self._memory = self._allocate(needed + LINE)
            self._memory[::PAGE] = 0  # the system hands out pages when they are touched

    def copy(self, arrays: Sequence[LocalArray]) -> list[LocalArray]:
        """Copy the values in ``arrays`` into this buffer; return equal objects whose values are views of the buffer.

        The call first waits until the last save no longer uses the buffer.
        """
        self.wait()
        self.reserve(arrays)
        copied, offset = [], -self._memory.ctypes.data % LINE
        for array in arrays:
            pieces = []
            for start, values in array.pieces:
                target = self._memory[offset : offset + values.nbytes]
                copy_past_cache(values.view(np.uint8), target)  # a thread will read it, once, when it comes to it
                pieces.append((start, target.view(values.dtype)))
                offset += _padded(values.nbytes)
            copied.append(replace(array, pieces=tuple(pieces)))
        return copied

    def close(self) -> None:
        """Wait until the last save no longer uses the memory, and release it; the next copy allocates memory again."""
        self.wait()
        if self._memory.size:
            self._release(self._memory)
        self._memory = np.empty(0, np.uint8)

    def keep(self, until: Callable[[], object]) -> None:
        """Register ``until``, which returns when the copy has been written, as the function that :meth:`wait` calls."""
        self._until_read = until

    def wait(self) -> None:
        """Wait until the thread of the last save has ended and no longer reads the buffer."""
        if self._until_read is not None:
            self._until_read()
            self._until_read = None


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


#: ``nice`` value of the writing thread, so that training and other ranks are preferred on its core.
_NICE = 10


def _lower_priority() -> None:
    """Lower the scheduling priority of the calling thread; do nothing on systems other than Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class WriterThread:
    """Run a thread that writes the elements of this rank into the state file (``state.h5``) and syncs the file to disk.

    The thread is a daemon, so a process that ends does not wait for it. The constructor opens the file before the
    thread starts. So the thread never writes into another file that a later save makes at the same path. The thread
    reports its progress to ``trace``, where other ranks can see it.
    """

    def __init__(
        self, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], name: str, trace: CallTrace
    ) -> None:
        self._trace = trace
        self._sums: list[PieceSums] | None = None
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(file, arrays, offsets), name=name, daemon=True)
        self._handle = -1
        try:
            self._handle = open_state(file)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # the other ranks learn of it where they ask for the result
            if self._handle >= 0:  # no more threads
                os.close(self._handle)
            self._failure = error

    def _run(self, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int]) -> None:
        _lower_priority()
        try:
            with self._trace.transfer(f"writing {file}") as advance:
                self._sums = write_pieces(self._handle, file, arrays, offsets, advance, self._stop.is_set)
        except WritingStopped:
            pass
        except Exception as error:  # raised again where all ranks can learn of it
            self._failure = error

    @property
    def finished(self) -> bool:
        """True once the thread has ended, with or without success."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ask the thread to stop before it writes the next block, and return without waiting. Not collective."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread has ended. Not collective."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> list[PieceSums]:
        """Wait until the thread has ended; return the checksums of its writes, or raise its error. Not collective."""
        self.join()
        if self._failure is not None:
            raise self._failure
        if self._sums is None:
            raise RuntimeError("the writing thread has ended without a result")
        return self._sums


class PendingSave:
    """Represent a save in progress, made by :func:`begin`: a thread writes values, the checkpoint does not exist yet.

    Only :meth:`commit` makes the checkpoint. If the object is deleted or the interpreter exits before :meth:`commit`,
    everything that was written is removed.

    Examples
    --------
    >>> import os
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     save = checkpoint.begin(f"{run}/start", [whole], {}, comm="self")
    ...     print(os.path.exists(save.target))
    ...     save.commit()
    ...     print(os.path.exists(save.target), save.ended)
    False
    True True
    """

    def __init__(
        self,
        comm: Communicator,
        plan: SavePlan,
        temporary: TemporaryFolder,
        writing: WriterThread,
        undo: tuple[ExitStack, ExitStack],
    ) -> None:
        self._comm, self._plan, self._temporary, self._writing = comm, plan, temporary, writing
        local, self._comm_stack = undo
        # Also called when this object is garbage-collected, and when the interpreter exits.
        self._clear = weakref.finalize(self, local.close)
        self._committed = False

    @property
    def target(self) -> str:
        """Path of the folder that will contain the checkpoint after :meth:`commit`."""
        return self._plan.target

    @property
    def finished(self) -> bool:
        """True once this rank has written its values or has failed; :meth:`commit` then waits only for other ranks."""
        return self._writing.finished

    @property
    def ended(self) -> bool:
        """True once the save was committed, has failed, or was discarded."""
        return not self._clear.alive

    def commit(self) -> None:
        """Wait until all ranks have written their values, and make the checkpoint; a second call does nothing.

        Collective over the communicator of :func:`begin`.

        Raises
        ------
        CheckpointError
            On every rank, if writing failed on any rank. Everything that was written is removed.
        RuntimeError
            If the save was discarded, or an earlier :meth:`commit` has failed.
        """
        if self._committed:
            return
        if self.ended:
            raise StateError(f"the save of {self.target} was discarded or has failed: begin another")
        agreement.check_call(self._comm, "PendingSave.commit")
        with self._comm_stack:
            try:
                with agreed(self._comm, self._plan.prefix):
                    sums = self._writing.result()
                publish(self._comm, self._plan, self._temporary, sums)
                self._committed = True
            finally:
                self._clear()

    def discard(self) -> None:
        """Cancel the save and remove what it has written; after :meth:`commit` do nothing.

        Not collective: the call waits neither for other ranks nor for the writing thread of this rank.
        """
        self._clear()


def begin(
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    comm: object = None,
    *,
    buffer: SnapshotBuffer | None = None,
    replace: bool = False,
    alignment: int = ALIGNMENT,
) -> PendingSave:
    """Copy values of arrays and attributes, start a thread that writes the copy, and return the save in progress.

    Collective over ``comm``. When this function returns, the caller may change the arrays. The thread writes with the
    back end "direct", without MPI. :meth:`PendingSave.commit` makes the checkpoint, with the same bytes as
    :func:`~mpizero.checkpoint.writer.write`.

    Parameters
    ----------
    folder, arrays, attributes, comm, replace, alignment
        As for :func:`~mpizero.checkpoint.writer.write`.
    buffer : SnapshotBuffer, optional
        Memory for the copy; None allocates new memory. A later save that uses the same buffer first waits until this
        save is written.

    Raises
    ------
    CheckpointError, ConfigError
        On every rank, as for :func:`~mpizero.checkpoint.writer.write`. Errors in the thread are raised by
        :meth:`PendingSave.commit`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     save = checkpoint.begin(f"{run}/start", [whole], {}, comm="self")
    ...     weight[...] = 0  # training goes on; the copy is what is saved
    ...     save.commit()
    ...     with checkpoint.open_checkpoint(f"{run}/start", comm="self") as reader:
    ...         print(reader.read_whole("parameters/weight")[1])
    [3. 4. 5.]
    """
    buffer = SnapshotBuffer() if buffer is None else buffer
    with ExitStack() as comm_stack, ExitStack() as local:
        world = comm_stack.enter_context(communicator_of(comm))
        temporary, copied = local.enter_context(TemporaryFolder(world, replace)), list[LocalArray]()

        def copy(wanted: Sequence[LocalArray]) -> None:
            if not copied:  # copied already if start() was called, even where another rank then had other arrays
                copied.extend(buffer.copy(wanted))

        def start(target: str, wanted: list[LocalArray]) -> str:
            copy(wanted)
            return temporary.open(target, buffer.layout.skeleton) if world.rank == 0 else ""

        plan = make_plan(world, folder, arrays, attributes, alignment, RepeatedSave(buffer.layout, start))
        # No rank writes before all have copied: writing would slow down the ranks that are still copying.
        temporary.agree(plan, lambda: copy(plan.local))
        thread = f"rank {world.rank} writes {plan.target}"
        writing = WriterThread(temporary.state, copied, plan.offsets, thread, world.trace)
        buffer.keep(writing.join)
        local.callback(writing.stop)
        return PendingSave(world, plan, temporary, writing, (local.pop_all(), comm_stack.pop_all()))
