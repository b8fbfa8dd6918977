"""ASGI middleware: what is checked and bounded before a route runs."""
