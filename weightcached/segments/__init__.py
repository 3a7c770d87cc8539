"""Segments: physical allocations that the kernel or the driver owns, one descriptor each."""
