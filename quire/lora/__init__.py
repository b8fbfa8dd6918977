"""LoRA adapters: files, matrices in memory, tables of the products that they change."""
