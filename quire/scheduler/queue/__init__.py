"""Waiting queues, one class per kind of order."""
