"""Kernel modules: implementations of one contract. The one in plain torch is the specification."""
