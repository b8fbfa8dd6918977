"""Backends of the language: an engine in this process, a quire server, or an endpoint with OpenAI's API."""
