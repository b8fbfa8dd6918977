"""What programs run on: an engine in this process, a server of quire, any endpoint with OpenAI's API."""
