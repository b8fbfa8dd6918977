"""Observability of requests: metrics, ids, access log, traces."""
