"""The load formats by which an engine takes its weights from a daemon."""

# vLLM's own name, and one that no other plug-in takes.
OWN_LOAD_FORMATS = ("ipc_cache", "weightcached")
