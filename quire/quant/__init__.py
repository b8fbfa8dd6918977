"""Low-bit weights: which weights of a model are stored in which scheme."""
