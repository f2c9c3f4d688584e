"""KV cache blocks: allocation, prefix cache, snapshots."""
