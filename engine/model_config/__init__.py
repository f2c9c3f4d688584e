"""Model configuration read from config.json: shapes, RoPE, sliding windows, mixture of experts, pooling."""
