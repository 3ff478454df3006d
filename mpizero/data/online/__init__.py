"""Train on samples that running simulations produce: over MPI in one job, or from a spool folder between two jobs."""
