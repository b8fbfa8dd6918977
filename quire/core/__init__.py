"""What crosses floors: requests, steps, results, events. Plain data, no torch, no decisions."""
