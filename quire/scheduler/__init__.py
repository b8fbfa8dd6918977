"""One scheduler: what runs next, on which memory, and what came of it."""
