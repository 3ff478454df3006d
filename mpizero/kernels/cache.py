"""Cache compiled kernels in a folder: one object file per kernel and dtype, compiled by one process per node.

The folder's name is a hash of every source file in the package ``mpizero.kernels``, of the compiler's version and of
the CPU. So after a change of a formula, of numba or of the CPU type, a new, empty folder is used, and outdated code
cannot be loaded. A file in the folder is run as machine code, so nobody but this user and root may be able to write to
it: see [Note: who may write] in :mod:`mpizero.kernels.private`. Numba's own cache, which stores pickles, is never used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mpizero._util.launch import launched_place
from mpizero._util.text import notice
from mpizero.errors import ConfigError
from mpizero.kernels.private import UnsafeFolderError, foreign, make_folder, own_folder

_DIGEST = 32
_OTHER_SETTINGS = ("NUMBA_CACHE_DIR", "NUMBA_ENABLE_CUDASIM", "NUMBA_NUM_THREADS")  # they change no machine code


class CacheFolder(NamedTuple):
    """Describe the folder of compiled kernels.

    Attributes
    ----------
    path : pathlib.Path
        The folder that is used.
    refused : str
        If other users can write to the folder that should be used, a text that says why it is not; otherwise "".
    remedy : str
        If ``refused`` is not empty, what the user can do to have that folder used; otherwise "".
    """

    path: Path
    refused: str = ""
    remedy: str = ""


def _wanted() -> Path | None:
    """Return the folder in which to put the cache: ``MPIZERO_CACHE_DIR``, or ``mpizero`` in the user's cache folder.

    The user's cache folder is ``XDG_CACHE_HOME`` or ``~/.cache``. Return None if the user has no home folder.
    """
    if configured := os.environ.get("MPIZERO_CACHE_DIR"):
        if (path := os.path.expanduser(configured)).startswith("~"):
            raise ConfigError(f"MPIZERO_CACHE_DIR={configured}: there is no such home folder; give the whole path")
        return Path(os.path.abspath(path))
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # which its specification wants ignored
        caches = os.path.expanduser("~/.cache")
    return Path(caches) / "mpizero" if os.path.isabs(caches) else None  # without a home, "~" stays as it is


def _own_root() -> Path:
    """Return a folder in /tmp (or another temporary folder for all users) that only this user can write.

    Raise PermissionError if no such folder can be made.
    """
    import tempfile

    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/dev/shm")):
        try:
            return own_folder(Path(base), f"mpizero-{os.geteuid()}")
        except OSError as error:
            tried.append(str(error))
    raise PermissionError(
        f"no place for compiled kernels that only you can write: {'; '.join(tried)}; "
        "set MPIZERO_CACHE_DIR to a folder of your own"
    )


def _choose_folder(name: str) -> CacheFolder:
    """Make the folder ``name`` where :func:`_wanted` says or, if that is unsafe or not possible, in :func:`_own_root`.

    If ``MPIZERO_CACHE_DIR`` is set and the folder cannot be made there, raise OSError.
    """
    root, refused = _wanted(), None
    try:
        if root is not None:
            path = make_folder(root, name)
            if os.environ.get("MPIZERO_CACHE_DIR") or os.access(path, os.W_OK | os.X_OK):
                return CacheFolder(path)
    except UnsafeFolderError as error:
        refused = error
    except OSError:  # a home that is full or read-only; a folder that was asked for by name has to be there
        if os.environ.get("MPIZERO_CACHE_DIR"):
            raise
    path = make_folder(_own_root(), name)
    if refused is None:
        return CacheFolder(path)
    return CacheFolder(path, f"{refused}: no machine code is loaded from there, it is kept in {path}", refused.remedy)


def _version_file(package: str) -> bytes:
    """Return the contents of a package's ``_version.py``, without importing the package (numba takes 0.4 s)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is needed to compile kernels: pip install numba", name=package)
    return Path(spec.origin).with_name("_version.py").read_bytes()


@functools.cache
def find_folder(cpu: str) -> CacheFolder:
    """Find or make the cache folder for this version of the kernels and for a CPU; ``cpu`` is its name and features.

    If other users can write to the folder that should be used, another one is used, and one process of each node prints
    a notice.

    Raises
    ------
    OSError
        If no folder can be made; the message names those that were tried.
    """
    digest = hashlib.sha256()
    package = os.path.dirname(__file__)
    for where, _, names in sorted(os.walk(package)):
        for name in sorted(name for name in names if name.endswith(".py")):
            digest.update(f"{where.removeprefix(package)}/{name}\n".encode())
            digest.update(Path(where, name).read_bytes())
    for compiler in ("numba", "llvmlite"):
        digest.update(_version_file(compiler))
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _OTHER_SETTINGS)
    digest.update(repr((sys.version_info[:3], sys.abiflags, cpu, settings)).encode())
    found = _choose_folder(f"kernels-{digest.hexdigest()[:24]}")
    if found.refused and speaks():
        notice(f"kernels: {found.refused}; {found.remedy}")
    return found


def speaks() -> bool:
    """Tell whether this process prints notices about the cache: the first one of each node does."""
    return launched_place(os.environ) == 0


def folder(cpu: str) -> Path:
    """Return the path of the cache folder for this version of the kernels and for a CPU; make it if it is missing."""
    return find_folder(cpu).path


def interpreted() -> bool:
    """Tell whether kernels run as plain Python (``NUMBA_DISABLE_JIT`` is set), for debugging and coverage."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file while the context is active; if the process dies, the lock is released.

    If the file system has no locks, do nothing.
    """
    import fcntl

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # without locks several processes compile the same bytes, and the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _read(path: Path) -> bytes | None:
    """Return the machine code in a file; None if the file is missing or damaged, or others could have written it."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(number, "rb") as file:
        found = os.fstat(number)
        if wrong := foreign(found):
            notice(f"kernels: {path} {wrong}: not loaded, but compiled again")
        if wrong or not stat.S_ISREG(found.st_mode):
            return None
        stored = file.read()
    code = stored[_DIGEST:]
    return code if hashlib.sha256(code).digest() == stored[:_DIGEST] else None


def load_or_build(path: Path, build: Callable[[], bytes]) -> bytes:
    """Return the machine code stored in the file ``path``.

    If the file is missing or damaged, or other users could have written it, one process of the node calls ``build``,
    which returns the machine code, and stores it with a checksum. The other processes wait for it.
    """
    if (code := _read(path)) is not None:
        return code
    with _locked(path.with_suffix(".lock")):
        if (code := _read(path)) is not None:
            return code
        import tempfile

        code = build()
        number, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", dir=path.parent)  # of mode 0600
        with open(number, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    return code
