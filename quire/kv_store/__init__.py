"""The bytes of blocks, and their ways."""
