"""Write the values of all ranks into one HDF5 file; each module is one back end of :func:`mpizero.checkpoint.write`."""
