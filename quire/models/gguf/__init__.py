"""GGUF files as checkpoints: reader, dequantization, and translation into Hugging Face's names and fields."""
