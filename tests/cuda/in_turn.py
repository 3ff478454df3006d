"""The threads of a simulated block, one after the other: a training is thousands of kernels.

Numba's simulator asks all the time whether the threads of a block have come to a barrier: that costs more than they do.
Here each runs to its next barrier or its end while all others wait, in one order and at the next barrier in the other.
The tests of single kernels have numba's own threads, which interrupt each other anywhere.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel as simulator


class _Thread(simulator.BlockThread):
    """A thread of a block, which runs when it is told to."""

    def __init__(self, *args):
        super().__init__(*args)
        self.allowed, self.stopped, self.ended = threading.Lock(), threading.Lock(), False
        self.allowed.acquire()
        self.stopped.acquire()

    def proceed(self):
        """Let the thread run to its next barrier or its end."""
        if self.ident is None:
            self.start()
        else:
            self.allowed.release()
        self.stopped.acquire()

    def run(self):
        super().run()
        self.ended = True
        self.stopped.release()

    def syncthreads(self):
        self.stopped.release()
        self.allowed.acquire()
        if self.abort:
            raise RuntimeError("abort flag set on syncthreads clear")


class _Block(simulator.BlockManager):
    """Runs the threads of a block in turn."""

    def run(self, grid_point, *args):
        sys.setswitchinterval(0.005)  # Python's own, for other ranks; shorter ones hasten only what asks all the time
        live = [
            _Thread(lambda: self._f(*args), self, grid_point, point, self._debug)
            for point in np.ndindex(*self._block_dim)
        ]
        while live:
            for thread in live:
                thread.proceed()
                if thread.exception:
                    self._abort(live)
                    raise thread.exception[0].with_traceback(thread.exception[1])
            live = [thread for thread in reversed(live) if not thread.ended]

    @staticmethod
    def _abort(live):
        for thread in live:
            if thread.ident is not None and not thread.ended:
                thread.abort = True
                thread.proceed()


def simulate_in_turn(set_attribute=setattr):
    """Have the simulator run the threads of a block in turn; ``set_attribute`` replaces the class that runs them."""
    set_attribute(simulator, "BlockManager", _Block)
