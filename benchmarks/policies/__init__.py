"""Queue policies: orders against the best order, fairness against a flood, and what deciding costs."""
