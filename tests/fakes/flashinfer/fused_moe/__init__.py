"""Of this package, one helper."""
