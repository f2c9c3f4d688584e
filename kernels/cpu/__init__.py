"""CPU backend: C++ kernels compiled once on the machine they run on. See docs/cpu-kernels.md."""
