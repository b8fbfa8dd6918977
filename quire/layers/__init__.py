"""Layers of models: linear, norms, attention, MLP, experts, rotary embeddings.

Layers are torch modules for the names of their parameters. They define `__call__`, not `forward`: mypy checks the
types of calls, and the overhead of torch's hooks, which are not used, is avoided.
"""
