"""Request queue, scheduler, KV cache and steps of one engine."""
