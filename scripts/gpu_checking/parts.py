"""List the parts of the check in the order in which they run: what tells most in a second comes first."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Describe a part of the check.

    ``function`` is a module of this package and a function in it, called as ``function(report, small)``. After
    ``limit`` seconds its processes are ended. ``gpu`` says whether it needs a GPU.
    """

    name: str
    function: str
    limit: int
    shows: str
    gpu: bool = True


PARTS = (
    Part("facts", "host.facts", 20, "GPU, driver, versions, CPU, memory, MPI, what `mpizero doctor` says", gpu=False),
    Part(
        "compiling", "kernels.compiling", 50, "all kernels compiled into one cache, on all cores, and loaded", gpu=False
    ),
    Part(
        "kernels", "kernels.compared", 45, "every kernel beside NumPy in float64; equal bits for any number of blocks"
    ),
    Part(
        "assumptions", "assumptions.assumptions", 25, "what the code takes for granted of CuPy, cuBLAS and the driver"
    ),
    Part("losses", "trainings.losses", 40, "20 steps on the GPU beside 20 on the CPU, skipped steps and loss scales"),
    Part("bits", "bits.bits", 60, "one sha256 for runs, ranks, strategies, stages and tiles that must not differ"),
    Part("files", "trainings.files", 20, "saved on the GPU, resumed on the CPU and back; asynchronous saves"),
    Part("torch", "adapters.torch_models", 20, "TorchModel on the GPU, whole and by blocks, beside plain PyTorch"),
    Part("jax", "adapters.jax_models", 20, "JaxModel on the GPU, whole and by blocks, beside plain JAX"),
    Part("sanitizer", "kernels.sanitizer", 40, "memcheck and racecheck of every kernel at small sizes"),
    Part(
        "speed", "speed.speed", 55, "AdamW beside a copy, tokens/s beside PyTorch and cuBLAS, where a step's time goes"
    ),
    Part("cpu", "host.cpu", 20, "the golden trainings on the GPU's host", gpu=False),
    Part("cores", "host.cores", 100, "tokens a second on the host's cores beside PyTorch DDP and FSDP2", gpu=False),
)
#: Parts that fail, each in its way, to show how that is told; they run only if they are asked for by name.
REHEARSED = {
    "crash": Part("crash", "failing.crash", 120, "a part that ends by a signal", gpu=False),
    "hang": Part("hang", "failing.hang", 1, "a part that does not end", gpu=False),
    "memory": Part("memory", "failing.memory", 120, "a part for which the GPU's memory is too small", gpu=False),
    "broken": Part("broken", "failing.broken", 120, "a part that cannot be imported", gpu=False),
}
