"""The engine with its inputs and outputs, and offline text processing."""
