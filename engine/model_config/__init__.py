"""config.json as data: shapes, RoPE, windows, experts. No torch."""
