"""ZeRO, tensor, pipeline and hybrid parallel training over MPI, with the same bits on any number of ranks."""
