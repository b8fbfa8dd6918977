"""Logits to tokens: what each row asked for, and what is reported beside the token."""
