"""Define the format of a checkpoint: the manifest, the descriptions of arrays, the HDF5 structure and the checksums."""
