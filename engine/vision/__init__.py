"""Vision towers: prepared images to rows of embeddings."""
