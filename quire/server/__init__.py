"""The engine behind HTTP: OpenAI's routes, health and metrics."""
