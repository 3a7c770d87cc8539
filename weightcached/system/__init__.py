"""The machine: paths, units, descriptors, processes, GPUs."""
