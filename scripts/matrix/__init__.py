"""Run a matrix of trainings, whole or a part that covers every pair: modules of the scripts that compare hashes."""
