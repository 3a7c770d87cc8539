"""Prometheus metrics and the health page."""
