"""What a model takes and where it runs, from arithmetic alone. No torch."""
