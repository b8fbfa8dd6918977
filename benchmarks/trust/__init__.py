"""Robustness of a server: killed engines, clients that disconnect, bodies that are too large."""
