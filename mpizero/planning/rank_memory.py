"""Predict the memory of one rank, part by part: what the engine allocates, and the arrays of a step.

[Note: held bytes] The parts in :data:`PARTS` up to "exchange buffers" are those that
:class:`mpizero.sharding.params.Memory` counts in a run, and agree with its counts to the byte. They are
private arrays, and shared windows in whole pages. "group buffers" are the message buffers or the window of a tensor or
context group. The other parts exist only during a step. "activations" are the most bytes that blocks keep for their
backward passes. "working arrays" are the bytes needed in addition while a block runs, at the moment of most memory.
"messages" are the additional bytes of a pipeline stage's messages in flight.

If layers compute on GPUs, activations and working arrays are on the GPU. The GPU then also has copies of the parameters
and of one unit's gradients (of all gradients, if a rank is alone in its data group). If the update runs on the GPU, it
also has the optimizer state and the update's buffers. The host's working arrays are then only the buffer for copies
between host and GPU and, if gradients stay on the GPU but the update runs on the host, the reduced gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from mpizero.kernels.gpu import STAGING
from mpizero.optim.elementwise import EMA, tensor_state_size
from mpizero.planning.activation_memory import StageActivations
from mpizero.planning.byte_counts import window_bytes
from mpizero.planning.traffic import RankTraffic
from mpizero.sharding.config import keeps_gradients_on_device, wave_slots
from mpizero.sharding.device import gradient_places
from mpizero.sharding.device_update import buffer_sizes, updates_on_device
from mpizero.sharding.grad_reduce import largest_block, residual_sizes
from mpizero.sharding.params import SLOTS, paged

#: The parts of a rank's memory, in the order in which they are shown.
PARTS = (
    "parameters",
    "gradients",
    "samples",
    "optimizer state",
    "residuals",
    "buffers",
    "exchange buffers",
    "group buffers",
    "activations",
    "working arrays",
    "messages",
)


class MemoryBytes(NamedTuple):
    """Hold the bytes of one part of a rank's memory.

    Attributes
    ----------
    private : int
        Bytes of arrays that only this rank has.
    shared : int
        Bytes of a window that ``sharers`` ranks share.
    sharers : int
        Number of ranks that share the window. (For a sum of windows with different numbers it is their least common
        multiple, and ``shared`` are the bytes of as many ranks' equal shares of all windows.)
    """

    private: int = 0
    shared: int = 0
    sharers: int = 1

    @property
    def mine(self) -> int:
        """The private bytes, and this rank's equal share of the window."""
        return self.private + self.shared // self.sharers

    def __add__(self, other: object) -> MemoryBytes:
        """Add private bytes, and this rank's shares of both windows."""
        if not isinstance(other, MemoryBytes):
            return NotImplemented
        sharers = lcm(self.sharers, other.sharers)
        shares = (sharers // each.sharers * each.shared for each in (self, other))
        return MemoryBytes(self.private + other.private, sum(shares), sharers)


@dataclass(frozen=True)
class RankMemory:
    """Compute the memory of one rank.

    Attributes
    ----------
    traffic : RankTraffic
        The rank's part of the model, and its messages.
    flow : StageActivations
        The memory that the rank's micro-batches need.
    """

    traffic: RankTraffic
    flow: StageActivations

    def parts(self) -> dict[str, MemoryBytes]:
        """Return the rank's memory on the host by part, without empty parts. Not collective."""
        figures = self.flow.figures
        found = {
            "parameters": self._parameters(),
            "gradients": MemoryBytes() if self._keeps_gradients else self._gradients(),
            "samples": self._samples(),
            "optimizer state": MemoryBytes(0 if self._updates_on_device else self._state() * self._item),
            "residuals": self._residuals(),
            "buffers": self._buffers(),
            "exchange buffers": MemoryBytes(self._exchange_buffers()),
            "group buffers": self._group_buffers(),
            "activations": MemoryBytes(0 if self._on_device else figures.kept),
            "working arrays": MemoryBytes(
                self._host_work if self._on_device else figures.most - figures.kept + self._copied
            ),
            "messages": MemoryBytes(figures.total - figures.most),
        }
        return {part: held for part, held in found.items() if held.private or held.shared}

    def device(self) -> dict[str, int]:
        """Return the bytes that the rank holds on its GPU, by part; an empty dict without a GPU. Not collective."""
        if not self._on_device:
            return {}
        layout, figures = self.traffic.part.layout, self.flow.figures
        state = {"optimizer state": self._state() * self._item} if self._updates_on_device else {}
        buffers = self._frozen if self._keeps_gradients else self._update_buffers() if self._updates_on_device else 0
        gradients = max((gradient_places(unit)[1] for unit in layout.units), default=0) * self._item
        return (
            state
            | ({"buffers": buffers} if buffers else {})
            | {
                "parameters": (layout.largest_gathered if self.traffic.sharded else layout.size) * self._item,
                "gradients": self._gradients().private if self._keeps_gradients else gradients,
                "activations": figures.kept,
                "working arrays": figures.most - figures.kept,
            }
        )

    @property
    def _copied(self) -> int:
        """The bytes of all parameters, of which a black box is given copies where they are sharded; else 0."""
        traffic = self.traffic
        copies = traffic.sharded and not traffic.training.by_block and any(traffic.jobs)
        return traffic.part.layout.size * self._item if copies else 0

    @property
    def _on_device(self) -> bool:
        return self.traffic.training.config.device != "cpu"

    @property
    def _keeps_gradients(self) -> bool:
        """Tell whether the gradients of all units stay on the GPU until the update."""
        return keeps_gradients_on_device(self.traffic.training.config, self.traffic.grid.data.size)

    @property
    def _host_work(self) -> int:
        """The host bytes of the buffer for copies to the GPU, and of the reduced gradient.

        The latter is 0 unless gradients stay on the GPU while the optimizer runs on the host.
        """
        fetched = self._keeps_gradients and not self._updates_on_device
        return STAGING + (self.traffic.part.layout.gradient_size * self._item if fetched else 0)

    def _update_buffers(self) -> int:
        norms, whole = self.traffic.training.optimizer.needs_tensor_norms, not self.traffic.sharded
        return sum(buffer_sizes(self.traffic.updated, self._item, norms=norms, whole=whole)) * self._item

    @property
    def _updates_on_device(self) -> bool:
        return updates_on_device(self.traffic.training.config, self.traffic.training.optimizer)

    # ------------------------------------------------------------------ what the engine allocates

    @property
    def _item(self) -> int:
        return self.traffic.training.itemsize

    def _shared(self, *sizes: int) -> MemoryBytes:
        """Return the memory of arrays that the node's ranks share: one window, each array in whole pages.

        ``sizes`` are the arrays' bytes. If the node has one rank, the arrays are private.
        """
        sharers = self.traffic.grid.node.size
        if sharers == 1:
            return MemoryBytes(sum(sizes))
        return MemoryBytes(0, sum(paged(size) for size in sizes), sharers)

    def _parameters(self) -> MemoryBytes:
        shards, grid = self.traffic.part.shards, self.traffic.grid
        if not self.traffic.sharded:
            return self._shared(shards.layout.size * self._item)
        return self._shared(sum(shards.shares[rank].size for rank in grid.node_ranks) * self._item)

    def _gradients(self) -> MemoryBytes:
        """Return the memory of gradients: rows, or in waves a wave buffer and a stack.

        A row is an array that holds a gradient or a partial sum. A wave buffer holds the gradients that the node's
        ranks computed for one or two units. The stack keeps partial sums from wave to wave. In both cases the buffer in
        which micro-batches are added is included, or with rows the scratch array for one block's gradients.
        """
        traffic, shards = self.traffic, self.traffic.part.shards
        step, grid = traffic.training.step, traffic.grid
        if not step.waves:
            plan = step.rows_plan(grid)
            rows = self._shared(step.rows(grid) * grid.node.size * paged(shards.layout.gradient_size * self._item))
            uses = plan.folds[grid.place].uses_scratch or (step.scratch == "micro-batches" and any(traffic.jobs))
            added = largest_block(shards.layout) * self._item if uses else 0
            return rows._replace(private=rows.private + (added if step.scratch else self._folded))
        slots = wave_slots(shards.layout, grid.node.size, in_place=traffic.training.in_place)
        buffer = self._shared(*[grid.node.size * paged(size * self._item) for size in slots])
        stack = step.wave_plan(grid).rows * sum(shards.gradients[grid.data.rank]) * self._item
        return buffer._replace(private=buffer.private + stack + self._folded)

    def _samples(self) -> MemoryBytes:
        """Return the memory of the samples that the node's ranks share if they claim grains."""
        training = self.traffic.training
        nbytes = training.step.claimed_bytes(self.traffic.grid, training.sample_bytes)
        return self._shared(nbytes) if nbytes else MemoryBytes()

    @property
    def _folded(self) -> int:
        """The bytes of the buffer in which the gradients of a grain's micro-batches are added; 0 if there is none."""
        several = self.traffic.training.step.accumulate > 1 and any(self.traffic.jobs)
        return self.traffic.part.layout.gradient_size * self._item if several else 0

    def _state(self) -> int:
        """Return the number of elements in this rank's optimizer state."""
        optimizer, tensors, rank = self.traffic.training.optimizer, self.traffic.tensors, self.traffic.grid.data.rank
        in_tensors = self.traffic.updated_in_tensors
        found = len(optimizer.slots) * (self.traffic.updated - in_tensors)
        own = (tensors.tensors[number].spec for number in tensors.owned(rank))
        average = EMA in optimizer.slots
        return found + average * in_tensors + sum(tensor_state_size(optimizer, spec) for spec in own)

    def _residuals(self) -> MemoryBytes:
        """Return the memory of the residuals of gradient compression, of the last step and of the current one.

        A residual is what compression left out of a message.
        """
        traffic = self.traffic
        totals = [sum(of_units) for of_units in traffic.compressed]
        replicated = not traffic.training.row.shard_optimizer
        sizes = residual_sizes(totals, traffic.grid.peers.rank, traffic.training.codec, replicated=replicated)
        return MemoryBytes(2 * sum(sizes) * self._item)

    def _buffers(self) -> MemoryBytes:
        """Return the memory of gathered units, and of the buffer that takes the gradients of frozen parameters."""
        units = MemoryBytes()
        if self.traffic.sharded:
            units = self._shared(*[self.traffic.part.layout.largest_gathered * self._item] * SLOTS)
        return units._replace(private=units.private + (0 if self._keeps_gradients else self._frozen))

    @property
    def _frozen(self) -> int:
        return self.traffic.part.layout.largest_frozen * self._item

    def _exchange_buffers(self) -> int:
        """Return the bytes of the largest buffers that the messages of gradients need."""
        traffic = self.traffic
        every = [*traffic.reductions(), *traffic.replications()]  # parameters go straight to their places
        buffers = [(e.send_buffer, e.receive_buffer, e.packed_send, e.packed_receive) for e in every]
        return sum(max(sizes) for sizes in zip(*buffers, strict=True))

    def _group_buffers(self) -> MemoryBytes:
        """Return the memory that tensor and context group keep for their calls: windows, or message buffers."""
        found = MemoryBytes()
        for group, calls in self.traffic.calls:
            if group.shares_memory:
                found += MemoryBytes(0, window_bytes(calls, group.size), group.size)
                continue
            rooms: Counter[str] = Counter()
            for call in calls:
                rooms |= Counter(call.rooms(group.rank, group.size))
            found += MemoryBytes(sum(rooms.values()))
        return found
