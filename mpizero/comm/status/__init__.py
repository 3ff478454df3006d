"""Share the status of every rank without MPI: in shared memory within a node, by TCP between nodes."""
