"""Blocks of the KV cache: allocation, prefix cache, snapshots. No torch."""
