"""Arithmetic on tensors: one contract, several modules that keep it; the torch one is the specification."""
