"""Where every rank stands, readable without MPI: shared memory within a node, TCP between nodes."""
