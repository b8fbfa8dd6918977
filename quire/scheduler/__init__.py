"""The scheduler, which composes the batch of each step."""
