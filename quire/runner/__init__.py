"""Runners: they do what a Step says. They decide nothing."""
