"""One engine's requests: queue, scheduler, KV cache, steps. No torch."""
