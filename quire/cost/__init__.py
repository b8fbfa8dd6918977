"""What things cost: bytes of a plan, seconds of a step."""
