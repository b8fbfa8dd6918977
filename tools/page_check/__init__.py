"""Checks of the page in a real browser."""
