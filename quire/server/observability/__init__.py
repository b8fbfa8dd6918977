"""What an operator sees of requests: metrics, ids, the access log, traces."""
