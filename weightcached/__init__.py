"""weightcached: keeps post-processed model weights resident across restarts of vLLM engines."""

__version__ = "0.1.0"
