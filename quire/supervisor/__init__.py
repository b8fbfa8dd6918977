"""The engine in a process of its own, and what it takes to go on when that process dies."""
