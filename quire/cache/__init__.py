"""The KV memory, decided here and touched elsewhere: which block belongs to whom."""
