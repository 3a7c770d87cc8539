"""The daemon of one device. Torch-free, all of it: it holds descriptors and hands them out."""
