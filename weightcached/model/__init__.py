"""A loaded model as storages and values: torch, no vLLM."""
