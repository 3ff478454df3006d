"""Commands started as a user starts them, as processes, alone or under mpiexec; or on threads of this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mpizero.cli.main import main
from mpizero.comm import Communicator
from mpizero.errors import MpizeroError, PeerFailure, RemoteError
from mpizero.guard.reports import user_message
from mpizero.testing import run_in_threads
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.toml import ConfigDocument, config_of, parse_config
from tests.faults.jobs import ENVIRONMENT, ROOT, launchers

#: Long enough for a machine that compiles kernels and runs dozens of other things besides; only a hang takes so long.
PATIENCE = 900
TINY = """
[model]
name = "gpt"
dim = 16
layers = 1
heads = 2
sequence = 16
[data]
text = "text.txt"
[train]
steps = 6
global_batch = 6
micro_batch = 1
validate_every = 3
validate_samples = 6
[optimizer]
lr = 1e-2
[checkpoint]
folder = "run/checkpoints"
every = 2
"""


@dataclass
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str

    def ended(self, status: int | None) -> Outcome:
        """Return this outcome, which must have a status; None is any."""
        assert status in (None, self.status), f"status {self.status}\n{self.out}\n{self.err}"
        return self

    @property
    def result(self) -> dict:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def told(self) -> list[str]:
        """Lines of standard error that are the program's own, not the launcher's nor progress."""
        return [line for line in self.err.splitlines() if "Error: " in line or line.startswith("Traceback")]


def metrics(run: Path | str) -> list[dict]:
    """Return the lines that a run has written into its folder."""
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def until(condition: Callable[[], object], pause: float = 0.02) -> None:
    """Wait for what a process of a test does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)


@dataclass
class Commands:
    """Runs ``python -m mpizero`` in a folder of its own."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, ranks: int, *arguments: str) -> subprocess.Popen:
        """Start a command on some ranks; 0 is without a launcher."""
        launcher: list[str] = []
        if ranks:
            if not launchers():
                pytest.skip("no mpiexec beside this Python, in PATH or in MPIZERO_MPIEXEC")
            launcher = [launchers()[0][0], "-n", str(ranks)]
        # What the launcher or the user of the tests has told them, their commands must not hear.
        told = ("PMI", "PMIX", "OMPI_COMM", "HYDRA", "MPI_", "PYTHONDONTWRITEBYTECODE")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(told)} | ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        if sys.dont_write_bytecode:  # nothing beside the sources, but compiled once for all tests of a session
            environment["PYTHONPYCACHEPREFIX"] = str(self.folder.parent / "bytecode")
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "mpizero", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    @staticmethod
    def finish(process: subprocess.Popen, status: int | None = 0) -> Outcome:
        """Wait for a command's end, which must have this status; one that hangs fails the test and is removed."""
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"hangs: {process.args}\n{out}\n{err}")
        return Outcome(process.returncode, out, err).ended(status)

    def __call__(self, ranks: int, *arguments: str, status: int | None = 0) -> Outcome:
        """Run a command to its end, which must have this status."""
        return self.finish(self.start(ranks, *arguments), status)

    def run(self, ranks: int, command: str, config: str, *settings: str, flags: Sequence[str] = (), **how) -> Outcome:
        """Run a command on a configuration with some settings replaced."""
        settings = tuple(part for setting in settings for part in ("--set", setting))
        return self(ranks, command, config, *settings, *flags, **how)

    def train(self, ranks: int, *settings: str, **how) -> Outcome:
        """Train the tiny model with some settings replaced."""
        return self.run(ranks, "train", "tiny.toml", *settings, **how)

    def start_training(self, ranks: int, *settings: str) -> subprocess.Popen:
        """Start a training of the tiny model without an end."""
        settings = ("train.steps=100000", *settings)
        return self.start(ranks, "train", "tiny.toml", *(part for setting in settings for part in ("--set", setting)))

    def signal_owner(self, number: signal.Signals) -> None:
        """Send a signal to the process that holds the lock of the run."""
        lock = (self.folder / "run" / ".lock").read_text()
        os.kill(int(re.match(r"process (\d+) on ", lock)[1]), number)

    def metrics(self, folder: str = "run") -> list[dict]:
        """Return the lines that a run wrote."""
        return metrics(self.folder / folder)


@dataclass
class ThreadCommands(Commands):
    """Runs commands on threads of this process: what tests no launcher, no signal and no end of a process."""

    def start(self, ranks: int, *arguments: str) -> subprocess.Popen:
        """Refuse to start a process."""
        raise NotImplementedError(f"commands on threads have no process: {ranks, arguments}")

    def __call__(self, ranks: int, *arguments: str, status: int | None = 0) -> Outcome:
        """Run a command on so many threads, at least one; an error must reach each of them, for none may wait."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        left = []

        def rank(comm: Communicator) -> int:
            try:
                return main(arguments, comm)
            except BaseException as error:
                left.append(error)
                raise

        with (
            contextlib.chdir(self.folder),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setenv("OMP_NUM_THREADS", "1")
            try:
                statuses = set(run_in_threads(max(ranks, 1), rank))
            except SystemExit as error:
                statuses = {error.code}
            except MpizeroError:
                assert len(left) == max(ranks, 1), left
                assert not any(isinstance(error, PeerFailure) for error in left), left
                first = next(error for error in left if not isinstance(error, RemoteError))
                print(user_message(first.with_traceback(None)), file=err)  # without the line of this file
                statuses = {int(first.status)}
        (found,) = statuses
        return Outcome(found, *(stream.buffer.getvalue().decode() for stream in (out, err))).ended(status)


def write_inputs(folder: Path) -> None:
    """Leave a text and a configuration in a folder."""
    (folder / "text.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    (folder / "tiny.toml").write_text(TINY)


def configured(folder: Path, *overrides: str) -> RunConfig:
    """Return the tiny run of ``folder`` with some settings replaced."""
    places = (f"data.text={folder}/text.txt", f"checkpoint.folder={folder}/run/checkpoints", "train.validate_every=0")
    return parse_config(ConfigDocument("tiny.toml", TINY, [*places, *overrides]))


@pytest.fixture
def mpizero(tmp_path):
    """Commands in a fresh folder that holds ``text.txt`` and ``tiny.toml``."""
    write_inputs(tmp_path)
    commands = Commands(tmp_path)
    yield commands
    for process in commands.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def on_threads(mpizero):
    """Commands in the folder of ``mpizero``, on threads of this process."""
    return ThreadCommands(mpizero.folder)


@pytest.fixture
def arrays(tmp_path):
    """A folder with forty samples of three features and two classes, ``x.npy`` and ``y.npy``."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.integers(0, 2, 40))
    return tmp_path


def perceptron_run(folder: Path, train: dict, **sections: dict) -> RunConfig:
    """Return a run of a small network on the ``arrays`` of a folder."""
    sections["checkpoint"] = {"folder": str(folder / "run" / "checkpoints")} | sections.get("checkpoint", {})
    return config_of(
        {
            "model": {"name": "mlp", "hidden": [4]},
            "data": {"arrays": {"x": str(folder / "x.npy"), "y": str(folder / "y.npy")}, "validation": 0.0},
            "train": {"global_batch": 8, "validate_every": 0, **train},
            **sections,
        }
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run of the tiny model on one process, to be read only: its commands and its outcome."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    commands = Commands(folder)
    return commands, commands.train(0)


@pytest.fixture
def without_collections(monkeypatch):
    """Leave out the collections of garbage before measurements of memory; what is counted does not depend on them."""
    monkeypatch.setattr("mpizero.tools.bench.strategies.release_free_memory", lambda: None)


@pytest.fixture
def round_machine():
    """A machine of round figures, for two ranks: a billion operations and bytes a second, a message takes a second."""
    from mpizero._util.numbers import Measurement
    from mpizero.tools.plan.time import Machine, MatrixProduct, MemoryPass, MessageSpeed

    def fixed(seconds: float) -> Measurement:
        return Measurement(seconds, seconds, seconds)

    def stream(name: str, reads: int, writes: int) -> MemoryPass:
        taken = fixed((reads + writes) * 4e-9 * 1000)
        ratios = {"ratio_one": fixed(1.0), "ratio_every": fixed(1.0)}
        return MemoryPass(name, reads, writes, 1000, 4, taken, taken, taken, taken, **ratios)

    mixes = {"read": (1, 0), "copy": (1, 1), "sum of 2": (2, 1), "sum of 4": (4, 1), "AdamW": (4, 3)}
    mixes["sum + AdamW"] = (5, 3)
    operations = ("exchange", "gather", "allreduce", "barrier")
    return Machine(
        host="round",
        date="2000-01-01T00:00:00+00:00",
        cpu="slow",
        blas="slow",
        libraries={},
        ranks=2,
        nodes=1,
        ranks_per_node=2,
        threads=1,
        dtype="float32",
        repeat=1,
        streams=tuple(stream(name, *mix) for name, mix in mixes.items()),
        products=(MatrixProduct("qkv", "forward", 1, 16, 16, 48, True, *[fixed(2 * 16 * 16 * 48 * 1e-9)] * 2),),
        messages=(
            *(MessageSpeed(operation, "all ranks", 0, 0, fixed(1.0)) for operation in operations),
            *(MessageSpeed(operation, "all ranks", 10**9, 10**9, fixed(1.0)) for operation in operations),
            MessageSpeed("one to one", "inside a node", 10**9, 10**9, fixed(1.0)),
        ),
        files=(),
    )
