"""Kernels: each hot operation has a reference in plain torch and faster backends behind one dispatch."""
