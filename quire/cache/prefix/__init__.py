"""The prefix cache: its two indexes, eviction policies, retention."""
