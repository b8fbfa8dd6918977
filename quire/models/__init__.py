"""Models: architectures as data, the shared decoder, and how it gets its weights."""
