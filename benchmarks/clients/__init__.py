"""Real clients against a server of quire."""
