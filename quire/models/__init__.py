"""Models: checkpoints, their descriptions, the shared decoder, and weight loading."""
