"""Parts that several architectures share. They hold packed weights and call `kernels`; none knows a queue."""
