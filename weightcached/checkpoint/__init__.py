"""Files of a checkpoint: which ones count, how to read them, and how to compare them."""
