"""OpenAI's API: chat, completions, embeddings."""
