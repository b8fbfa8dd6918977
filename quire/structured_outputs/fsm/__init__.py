"""The built-in grammar backend: minimal byte-level automata with token masks and forced text."""
