"""A CUDA device or the host: streams, events, uploads; experts that the CPU computes beside a GPU."""
