"""The KV cache of the control plane: block pools, block tables, prefix index. It has no bytes of KV."""
