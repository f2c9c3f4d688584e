"""The runner for devices that work on their own: see docs/gpu-engine.md for how a step flows through it.

while loading   opened.py     what is free before this process takes anything
                load.py       from weights to a runner whose KV memory fits
                trial.py      steps that serve nobody; memory.py: what they took
in a step       runner.py     launches and collects
                rows.py       what stays on the device of each request; upload.py: what changed, in one copy
                inputs.py     what one forward pass reads
                graphs.py     decoding steps captured, by cuda_graphs.py
                sampler.py    tokens, by a kernel of the backend or by draw.py and noise.py
                hand_back.py  tokens on their way from the last stage to the first
what differs    device.py     a GPU, or a CPU in its place
"""
