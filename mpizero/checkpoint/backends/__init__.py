"""Write the bytes of all ranks into one HDF5 file: the back ends of saving."""
