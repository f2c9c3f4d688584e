"""Hardware of this machine: CPU, memory, cgroup limits, GPUs, processes."""
