"""The server tests of vLLM and SGLang against a server of quire."""
