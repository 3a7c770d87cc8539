"""Data only: the key, the tensor index, which storages may be shared."""
