"""The blocks that models are made of. They know shapes and weights, and neither families nor where KV lies.

Blocks are modules for the names of their parameters. Each defines its call itself: types are checked, and
hooks, which nothing here uses, cost nothing.
"""
