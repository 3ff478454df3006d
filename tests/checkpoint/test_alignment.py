"""Where arrays start in the file: at multiples of 64 bytes, the wide ones at multiples of more if asked."""

from __future__ import annotations

import h5py
import pytest

from mpizero import checkpoint
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads


@pytest.mark.parametrize(("alignment", "ranks", "number"), [(64, 1, 5), (512, 3, 5), (4096, 1, 100)])
def test_wide_arrays_start_where_asked_and_all_others_at_64_bytes(small, tmp_path, alignment, ranks, number):
    folder = tmp_path / "c"
    wide = {f"optimizer/{k}": small.arrays["parameters/a"].repeat(27).reshape(45, 24) for k in range(number)}
    many = {f"parameters/{k}.{name[-1]}": whole for k in range(number // 5) for name, whole in small.arrays.items()}
    every = type(small)(many | wide)

    def save(comm):
        checkpoint.write(folder, every.pieces(comm.rank, comm.size), every.attributes, comm, alignment=alignment)

    run_in_threads(ranks, save)
    with h5py.File(folder / "state.h5") as file:
        for path, whole in every.arrays.items():
            assert file[path].id.get_offset() % (alignment if whole.nbytes >= alignment else 64) == 0
            assert file[path][()].tobytes() == whole.tobytes()
    assert every.loads(folder)
    assert checkpoint.verify(folder) == (folder / "state.h5").stat().st_size


@pytest.mark.parametrize("alignment", [-64, 32, 96, 8192])
def test_other_alignments_are_refused(small, tmp_path, alignment):
    with pytest.raises(ConfigError, match="alignment must be a power of two from 64 to 4096"):
        checkpoint.write(tmp_path / "c", small.whole(), {}, alignment=alignment)
    with pytest.raises(ConfigError, match=f"got {alignment}"):
        checkpoint.begin(tmp_path / "c", small.whole(), {}, alignment=alignment)
