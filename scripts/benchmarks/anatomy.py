"""Take training steps of the GPT of compare.py apart: calls, matrix products, other kernels, messages, interpreter.

For each of mpizero's strategies the step is timed as it is, and then with clocks around each kernel and each message.
"calls" are those of Python functions and of functions in C in one step. "products" and "attention" are kernels; "other
kernels" are all others; "messages" are collectives and barriers, waiting included; "interpreter" is the rest: Python,
NumPy and the clocks. "alone" is what the step's products take by NumPy's BLAS, as "products alone" of compare.py; those
of attention are in it. All are medians over steps on rank 0, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from comparing.ours import PRESETS, STRATEGIES, Ours, Products
from harness.jobs import answer, ranks_of
from harness.options import parser, positive
from harness.tables import markdown

PARTS = ("products", "attention", "other kernels", "messages", "interpreter")


class Clock:
    """Add up the ``seconds`` of each part of a step; time outside of watched calls is the interpreter's."""

    def __init__(self) -> None:
        self.seconds, self._last = Counter[str](), time.monotonic()

    def spend(self, part: str) -> None:
        """Add the time since the last call to ``part``."""
        now = time.monotonic()
        self.seconds[part] += now - self._last
        self._last = now

    def take(self) -> Counter[str]:
        """Return the seconds of each part until now, and begin anew."""
        self.spend("interpreter")
        found, self.seconds = self.seconds, Counter[str]()
        return found

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that does as ``function``, and counts as ``part``; it may contain no other one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.spend("interpreter")
            try:
                return function(*args, **kwargs)
            finally:
                self.spend(part)

        return call

    def watch(self, owner: type, name: str, part: Callable[[Any], str]) -> None:
        """Count calls of the method ``name`` of ``owner`` as ``part(object)``."""
        method = getattr(owner, name)

        @wraps(method)
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            return self.timed(method, part(first))(first, *args, **kwargs)

        setattr(owner, name, call)


def kernel_part(name: str) -> str:
    """Return the part that the kernel called ``name`` belongs to."""
    if name == "product":
        return "products"
    return "attention" if name.startswith("causal_attention") else "other kernels"


def watch_recordings(clock: Clock) -> None:
    """Count the kernels that recordings repeat, like those that layers call."""
    from mpizero.kernels.recording import Recording

    repeat, watched = Recording.repeat, set()

    def call(recording: Any, *args: Any) -> None:
        if id(recording) not in watched:
            watched.add(id(recording))
            recording.calls = [
                (clock.timed(f, kernel_part(f.__name__)) if hasattr(f, "__self__") else f, values)
                for f, values in recording.calls
            ]
        repeat(recording, *args)

    Recording.repeat = call


def calls_of(step: Callable[[], Any]) -> int:
    """Return how many functions of Python and of C one call of ``step`` calls."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: events.update((event,)))
    step()
    sys.setprofile(None)
    return events["call"] + events["c_call"]


def rank(args: argparse.Namespace) -> dict[str, dict[str, float]] | None:
    """Run as one rank: take the steps of each strategy apart, and return on rank 0 a row of milliseconds for each."""
    from mpizero.comm.communicator import Transport
    from mpizero.kernels.jit import Kernel

    shape, rows = PRESETS[args.preset] | {"threads": 1, "vocabulary": 256}, {}
    limit = Products("", shape, None)
    limit.prepare()
    alone = statistics.median(limit.turn(1, 1) for _ in range(args.steps))
    models = {strategy: Ours(strategy, shape, None) for strategy in STRATEGIES}
    clock, whole, calls = Clock(), {}, {}

    def steps_of(ours: Ours) -> list[Counter[str]]:
        clock.take()
        return [ours.train() or clock.take() for _ in range(args.steps)]

    for strategy, ours in models.items():
        ours.prepare()
        ours.turn(5, 0)
        whole[strategy] = statistics.median(step.total() for step in steps_of(ours))
        calls[strategy] = calls_of(ours.train)
    clock.watch(Kernel, "__call__", lambda kernel: kernel_part(kernel.name))
    watch_recordings(clock)
    clock.watch(Transport, "_run", lambda _: "messages")
    for strategy, ours in models.items():
        steps = steps_of(ours)
        parts = {part: 1e3 * statistics.median(step[part] for step in steps) for part in PARTS}
        rows[strategy] = {"step": 1e3 * whole[strategy], "calls": calls[strategy], "alone": 1e3 * alone} | parts
        ours.model.close()
    return rows if limit.world.rank == 0 else None


def main() -> None:
    """Run as a rank, or start the ranks and print their table."""
    options = parser(__doc__, mpiexec=True)
    options.add_argument("--preset", choices=PRESETS, default="base", help="shapes (default: %(default)s)")
    options.add_argument("--steps", type=positive, default=30, help="of each kind (default: %(default)s)")
    args = options.parse_args()
    if args.be:
        if rows := rank(args):
            answer(rows)
        return
    words = ("--be", "rank", "--preset", args.preset, "--steps", str(args.steps))
    rows = ranks_of(__file__, args.mpiexec, PRESETS[args.preset]["ranks"], *words)
    columns = ("step", "calls", "alone", *PARTS)
    digits = [0 if column == "calls" else 2 for column in columns]
    cells = [(name, *(f"{row[c]:,.{n}f}" for c, n in zip(columns, digits, strict=True))) for name, row in rows.items()]
    print(markdown(("", *columns), cells))


if __name__ == "__main__":
    main()
