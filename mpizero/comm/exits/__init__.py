"""The end of a job: find out that a rank fails or leaves, and end all ranks together."""
