"""Routes of Text Generation Inference."""
