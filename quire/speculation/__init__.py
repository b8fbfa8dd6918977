"""Speculative decoding with drafters that need only tokens: proposals, and the governor that decides which pay."""
