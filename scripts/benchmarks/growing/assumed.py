"""Describe an assumed cluster, which was not measured, as a machine file of `mpizero plan`."""

from __future__ import annotations

from dataclasses import dataclass

from mpizero._util.numbers import Measurement
from mpizero.tools.plan.time import NEEDED, Machine, MatrixProduct, MemoryPass, MessageSpeed

#: Numbers of arrays that are read and written by each pass over memory that a machine file must have.
MIXES = {"read": (1, 0), "copy": (1, 1), "sum of 2": (2, 1), "sum of 4": (4, 1), "AdamW": (4, 3), "sum + AdamW": (5, 3)}
#: Elements of each array of these passes, and bytes of the larger message of each kind.
ELEMENTS, LARGE = 10**9, 10**9


@dataclass(frozen=True)
class Assumed:
    """Describe a cluster: the speed of its ranks, and of the one network link that all ranks of a node share."""

    ranks_per_node: int = 8
    #: Cores of each rank.
    threads: int = 24
    #: Float32 operations a second of one rank's matrix products while all ranks compute.
    rate: float = 1.5e12
    #: Bytes a second that one rank reads and writes in a pass over memory while all ranks do so.
    memory: float = 90e9
    #: Bytes a second that a node sends to other nodes, and the same number that it receives meanwhile.
    link: float = 25e9
    #: Bytes a second from one rank to another rank of its node.
    inside: float = 10e9
    #: Seconds of the smallest message from one rank to another; of the smallest collective, and of a barrier.
    latency: float = 2e-6
    collective: float = 2e-5

    def machine(self, rows: int, dim: int) -> Machine:
        """Return the contents of the machine file; its one matrix product has ``rows`` rows and ``dim`` features."""
        passes = tuple(self._pass(name, *MIXES[name]) for name in NEEDED)
        seconds = _exactly(2 * rows * dim * 3 * dim / self.rate)
        product = MatrixProduct("query, key, value", "forward", 1, rows, dim, 3 * dim, True, seconds, seconds)
        share = self.link / self.ranks_per_node
        messages = [m for name in ("exchange", "gather", "allreduce") for m in self._messages(name, "all ranks", share)]
        messages += self._messages("one to one", "inside a node", self.inside, self.latency)
        messages += self._messages("one to one", "between nodes", share, self.latency)
        messages.append(MessageSpeed("barrier", "all ranks", 0, 0, _exactly(self.collective)))
        return Machine(
            host="a cluster that is assumed, not measured",
            date="never",
            cpu=f"{self.threads} cores a rank, assumed",
            blas="assumed",
            libraries={},
            ranks=2 * self.ranks_per_node,
            nodes=2,
            ranks_per_node=self.ranks_per_node,
            threads=self.threads,
            dtype="float32",
            repeat=1,
            streams=passes,
            products=(product,),
            messages=tuple(messages),
            files=(),
        )

    def _pass(self, name: str, reads: int, writes: int) -> MemoryPass:
        seconds = _exactly((reads + writes) * 4 * ELEMENTS / self.memory)
        one = _exactly(1.0)
        return MemoryPass(name, reads, writes, ELEMENTS, 4, seconds, seconds, seconds, seconds, one, one)

    def _messages(self, operation: str, where: str, speed: float, latency: float | None = None) -> list[MessageSpeed]:
        least = self.collective if latency is None else latency
        sizes = ((8, least), (LARGE, least + LARGE / speed))
        return [MessageSpeed(operation, where, size, size, _exactly(seconds)) for size, seconds in sizes]


def _exactly(seconds: float) -> Measurement:
    return Measurement(seconds, seconds, seconds)
