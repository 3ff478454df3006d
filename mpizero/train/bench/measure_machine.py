"""Measure how fast a machine multiplies, moves memory, sends messages and writes files: ``mpizero bench machine``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from threadpoolctl import threadpool_limits

from mpizero._util.checks import whole
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import mpi_facts, versions
from mpizero.errors import ConfigError
from mpizero.kernels.matmul import library
from mpizero.nn.arrays import keep_freed_memory
from mpizero.planning.machine_file import Machine, write_machine
from mpizero.train import machine as facts
from mpizero.train.bench.file_speed import FileBenchmark
from mpizero.train.bench.memory_bandwidth import ARRAYS, PassBenchmark
from mpizero.train.bench.message_speed import MessageBenchmark
from mpizero.train.bench.product_rates import ProductBenchmark, ProductShapes
from mpizero.train.bench.strategy_memory import require_room
from mpizero.train.config.checks import check_option


@dataclass(frozen=True)
class MachineRequest:
    """Describe the sizes and repetitions to measure.

    Attributes
    ----------
    shapes : ProductShapes
        Shapes of the matrix products.
    elements : int
        Number of float32 elements of each array that the memory benchmark reads or writes. The arrays together
        should be larger than all caches of the processor.
    largest : int
        Bytes of the largest message that is timed.
    file_bytes : int
        Bytes of the file that all ranks write together; 0 measures no file.
    folder, output : str
        The folder in which a file is timed; the path of the machine file, to which the results are written.
    repeat : int
        Repetitions of every measurement.
    threads : int
        BLAS threads of each rank.
    """

    shapes: ProductShapes = field(default_factory=ProductShapes)
    elements: int = 1 << 24
    largest: int = 1 << 23
    file_bytes: int = 128_000_000
    folder: str = "."
    output: str = "machine.json"
    repeat: int = 7
    threads: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that are too small, an odd number of elements, and folders that do not exist."""
        least = {"elements": 2, "largest": 8, "file_bytes": 0, "repeat": 1}
        for name, bound in least.items():
            check_option(f"--{name.replace('_', '-')}", getattr(self, name), whole(bound))
        if self.elements % 2:
            raise ConfigError(f"--elements {self.elements}: must be even")
        for option, folder in (("--folder", self.folder), ("--output", str(Path(self.output).parent))):
            if not os.path.isdir(folder):
                raise ConfigError(f"{option}: {folder} is no folder")


def measure_machine(
    request: MachineRequest, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> Machine:
    """Measure memory, matrix products, messages and a file in interleaved repetitions, and return the figures.

    All ranks get the same figures, and rank 0 writes them to the machine file. Collective over ``comm``. On rank 0,
    ``tell`` is called with a line of text before each repetition.
    """
    with all_ranks(comm):
        require_room(request.elements, 4 * ARRAYS * request.elements * comm.size, comm.size, "--elements")
        library()  # load it now: the limit of threads below reaches loaded libraries only
    keep_freed_memory()
    files = FileBenchmark(comm, request.file_bytes, request.folder) if request.file_bytes else None
    try:
        with threadpool_limits(request.threads, user_api="blas"):
            streams, products = PassBenchmark(comm, request.elements), ProductBenchmark(comm, request.shapes)
            messages = MessageBenchmark(comm, request.largest)
            for number in range(request.repeat + 1):  # the first one warms up
                if comm.rank == 0:
                    tell(f"repetition {number} of {request.repeat}" if number else "warm-up")
                turn = -1 if number % 2 else 1
                for part in (streams, products, messages)[::turn]:
                    part.measure(turn, keep=number > 0)
                if files is not None and number:
                    files.measure()
    finally:
        if files is not None:
            files.close()
    return _machine(request, comm, (streams, products, messages, files))


def _machine(
    request: MachineRequest,
    comm: Communicator,
    parts: tuple[PassBenchmark, ProductBenchmark, MessageBenchmark, FileBenchmark | None],
) -> Machine:
    streams, products, messages, files = parts
    mpi = mpi_facts() if comm.size > 1 else None
    libraries = dict(versions()) | ({} if mpi is None else {"MPI": f"{mpi.vendor} {mpi.version}"})
    nodes = [messages.leaders.count(leader) for leader in sorted(set(messages.leaders))]
    made = Machine(
        host=facts.host(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=facts.processor(),
        blas=facts.blas(),
        libraries=libraries,
        ranks=comm.size,
        nodes=len(nodes),
        ranks_per_node=max(nodes),
        threads=request.threads,
        dtype=request.shapes.dtype,
        repeat=request.repeat,
        streams=streams.figures(),
        products=products.figures(),
        messages=messages.figures(),
        files=() if files is None else files.figures(),
    )
    machine: Machine = comm.broadcast_object(made, tag="bench")
    with all_ranks(comm):
        if comm.rank == 0:
            write_machine(request.output, machine)
    return machine
