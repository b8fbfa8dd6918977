"""Hypothesis settings for the mind: derandomised in CI, so that a red run can be repeated."""

from hypothesis import settings

settings.register_profile("mind", deadline=None, derandomize=True)
settings.load_profile("mind")
