# Tried: compiled by Python, and the names of its packages looked up in Spack's. Not built: there was no Spack.
# tests/test_packaging.py compares it with setup.cfg.
# Spack's py-isal was at 1.1 and lacks newer versions: `spack checksum --add-to-package py-isal 1.8.0` adds one.
# The source is the folder in which it is started: spack dev-build py-mpizero@0.1.0
# Extras without a variant, for which pip is the way: mpich, cuda12, cuda13, mkl, tensorboard, safetensors, jax, completion.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpizero(PythonPackage):
    """ZeRO and FSDP training over MPI, with the same bits on any number of ranks."""

    license("BSD-3-Clause")

    version("0.1.0")

    variant("torch", default=False, description="Install what the extra torch needs")
    variant("zarr", default=False, description="Install what the extra zarr needs")
    variant("netcdf", default=False, description="Install what the extra netcdf needs")
    variant("digits", default=False, description="Install what the extra digits needs")
    variant("plot", default=False, description="Install what the extra plot needs")

    depends_on("mpi", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@2.0:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numba@0.62:")
        depends_on("py-h5py@3.11:+mpi")
        depends_on("py-isal@1.7:")
        depends_on("py-greenlet@3.1:")
        depends_on("py-threadpoolctl@3.1:")
        depends_on("py-tqdm@4.60:")
        depends_on("py-torch@2.5:", when="+torch")
        depends_on("py-zarr@3.0:", when="+zarr")
        depends_on("py-h5netcdf@1.3:", when="+netcdf")
        depends_on("py-scikit-learn", when="+digits")
        depends_on("py-matplotlib", when="+plot")

    import_modules = ["mpizero"]
