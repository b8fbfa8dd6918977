"""Routes with their request and response formats, one package per API."""
