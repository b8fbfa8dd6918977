"""Model files: local paths, the Hugging Face Hub, the embedded model."""
