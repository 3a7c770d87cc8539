"""Files of a checkpoint: which are read, what they hold, what identifies them."""
