"""Batch files: OpenAI's batch format, run offline."""
