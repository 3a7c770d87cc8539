"""What the daemon and the tools ask of the machine: paths, units, descriptors, GPUs."""
