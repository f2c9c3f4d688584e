"""The runner for devices that work on their own: see docs/gpu-engine.md for how a step flows through it."""
