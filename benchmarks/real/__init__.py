"""Measurements on SmolLM2-135M-Instruct, a published model, and on real text."""
