"""The engine process, its supervision and its restart after a crash."""
