"""Constraints and programs: what they cost and what they save."""
