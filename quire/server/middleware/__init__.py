"""ASGI middleware of the server: checks and limits before a route runs."""
