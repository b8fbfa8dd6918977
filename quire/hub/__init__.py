"""Sources: from what a user calls a model to files on this machine."""
