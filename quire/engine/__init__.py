"""From options to an engine, and from text to tokens and back."""
