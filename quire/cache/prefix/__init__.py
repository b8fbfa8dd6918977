"""Which cached KV is given up first, and what requests may ask about that."""
