"""Facts of this machine: CPU, memory, cgroups, NVML."""
