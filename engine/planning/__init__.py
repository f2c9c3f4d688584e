"""Memory, speed and placement of a model, computed from its shape and the hardware."""
