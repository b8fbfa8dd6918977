"""Mutations: faults of one line, and which tests catch each of them."""
