"""Back ends of saving: how the bytes of all ranks come into one HDF5 file."""
