"""Generations as files: written once after a load, read back without torch and without vLLM."""
