"""Define the format of a checkpoint: manifest, table of arrays, HDF5 skeleton and checksums."""
