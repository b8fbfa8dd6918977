"""GGUF files as checkpoints: header reader, dequantization, translation to Hugging Face's names and fields."""
