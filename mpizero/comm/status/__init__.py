"""Share the status of every rank without MPI: by shared memory within a node, by TCP between nodes."""
