"""Models: what a checkpoint folder says, one shared decoder, and how weights get into it."""
