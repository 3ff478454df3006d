"""Context parallelism: layers on sequences that are cut among ranks."""
