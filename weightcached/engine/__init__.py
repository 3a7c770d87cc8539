"""The engine service: a supervisor without torch that keeps an HTTP endpoint served by vLLM."""
