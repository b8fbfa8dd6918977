"""Simulation of an engine, plans for hardware, and the figures of papers: the real scheduler in virtual time."""
