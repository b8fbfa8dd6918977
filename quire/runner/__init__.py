"""Runners, which execute Steps."""
