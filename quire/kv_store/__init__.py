"""Memory of KV blocks on the device and in the host pool, with the copies between them."""
