"""vLLM's routes of pooling: classification, scores of pairs, reranking."""
