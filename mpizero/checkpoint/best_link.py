"""Mark the best checkpoint of a run by a link beside the step folders."""

from __future__ import annotations

import os

from mpizero.checkpoint.atomic_folder import sync_folder
from mpizero.checkpoint.failures import on_root
from mpizero.checkpoint.folders import step_folder, step_of
from mpizero.comm.startup import communicator_of
from mpizero.errors import CheckpointError

#: Name of the link to a run's best checkpoint, beside the step folders.
BEST = "best"


def marked_best(folder: str | os.PathLike[str]) -> int | None:
    """Return the step to which the link ``best`` in ``folder`` points; None if there is no link. Not collective.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.mark_best(run, 2, comm="self")
    ...     print(checkpoint.marked_best(run))
    2
    """
    try:
        return step_of(os.readlink(os.path.join(os.fspath(folder), BEST)))
    except OSError:
        return None


def mark_best(folder: str | os.PathLike[str], step: int | None, comm: object = None) -> None:
    """Make the link ``best`` in ``folder`` point to the checkpoint of ``step``; None removes the link.

    A link that exists is replaced in one step, so there is always a link to a whole checkpoint, also if the process is
    killed. Collective over ``comm``; only rank 0 changes the link.

    Raises
    ------
    CheckpointError
        If ``best`` is no link, or cannot be made.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(checkpoint.step_folder(run, 2), [], {"loss": 0.5}, comm="self")
    ...     checkpoint.mark_best(run, 2, comm="self")
    ...     with checkpoint.open_checkpoint(f"{run}/best", comm="self") as reader:
    ...         print(reader.attributes)
    {'loss': 0.5}
    """
    where = os.path.abspath(os.fspath(folder))
    link, new = os.path.join(where, BEST), os.path.join(where, f".{BEST}.new")

    def point() -> None:
        if os.path.lexists(link) and not os.path.islink(link):
            raise CheckpointError(f"{link} is no link to a checkpoint: rename it")
        if step is None:
            if os.path.islink(link):
                os.unlink(link)
            return
        name = os.path.basename(step_folder(where, step))
        if os.path.islink(link) and os.readlink(link) == name:
            return
        if os.path.lexists(new):  # of a process that was killed
            os.unlink(new)
        os.symlink(name, new)
        os.replace(new, link)
        sync_folder(where)

    with communicator_of(comm) as world:
        on_root(world, f"cannot mark the best checkpoint of {os.fspath(folder)}", point)
