"""A layer of one's own, a step of diffusion, on fields cut over ranks: mpiexec -n 4 python diffusion_layer.py."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model


@dataclass(frozen=True)
class Diffusion(mz.nn.Layer):
    """An explicit step of diffusion on a periodic grid, u + k * laplacian(u), with a trained k for each channel."""

    channels: int
    domain: Any = None  # the ranks that share space; None: u is the whole field

    def domain_form(self, domain):
        """Return the layer for a rank's part of a field."""
        return replace(self, domain=domain)

    def own_specs(self):
        """Describe k, which starts with zeros."""
        return (mz.types.ParameterSpec("k", (self.channels,)),)

    def laplacian(self, u):
        """Return the sum of all neighbours minus u; a halo of one position has those of other ranks."""
        wide, axes = mz.nn.halo_exchange(u, 1, periodic=True, group=self.domain), range(1, u.ndim - 1)
        cut = [slice(None), *(slice(1, -1) for _ in axes)]
        around = [wide[(*cut[:axis], side, *cut[axis + 1 :])] for axis in axes for side in (slice(-2), slice(2, None))]
        return sum(around) - 2 * len(axes) * u

    def forward(self, params, u, run=mz.types.EVALUATE):
        """Return the next field, and its Laplacian for the gradient of k."""
        change = self.laplacian(u)
        return u + params["k"] * change, change

    def backward_input(self, params, change, dy):
        """Return the gradient of u: the Laplacian is its own adjoint, so a halo of dy is fetched."""
        return dy + self.laplacian(params["k"] * dy), dy

    def backward_weights(self, params, change, dy, grads):
        """Write this rank's share of the gradient of k, a sum over samples and space."""

        def of_tile(change, dy):
            return (change * dy).sum(axis=tuple(range(dy.ndim - 1)))

        grads["k"][...] = mz.nn.domain_sum((change, dy), of_tile, group=self.domain, share=True)


@dataclass(frozen=True)
class OneStep:
    """A model of one block, whose loss adds up over positions."""

    blocks = {"step": Diffusion(2)}  # noqa: RUF012
    loss = mz.nn.FieldLoss(mz.nn.MeanSquaredError())
    dtype, seed = np.dtype(np.float32), 0


def main() -> None:
    """Train on fields after one step, of which each rank has its part; print the coefficients that are found."""
    space = 24, 40
    x = np.random.default_rng(0).normal(size=(32, *space, 2)).astype(np.float32)
    y, _ = Diffusion(2).forward({"k": np.float32([0.05, 0.2])}, x)
    check_model(OneStep(), x[:3, :5, :3], y[:3, :5, :3], comm="self")

    with (
        mz.Mesh(MPI.COMM_WORLD, domain=(1, MPI.COMM_WORLD.size)) as mesh,
        mz.distribute(OneStep(), mz.Adam(lr=1e-2), "zero2", mesh=mesh, config=mz.Config(micro_batch=4)) as model,
    ):
        for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=8, seed=0, steps=100):
            loss = model.train(*part)  # this rank's part of every sample
        first, second = model.named_parameters()["step.k"]
        digest, ranks = model.parameters_sha256(), model.world_size
        if model.rank == 0:
            print(f"loss {loss:.1e}, k {first:.3f} and {second:.3f}, {digest[:16]} on {ranks} ranks")


if __name__ == "__main__":
    main()
