"""Routes of llama.cpp's server."""
