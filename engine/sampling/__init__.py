"""Sampling: from logits to token ids.

A row's token is a function of that row's logits and its request, bit by bit: neither the neighbors in the
batch nor the way a kernel splits its work can change it. `kernels/reference/sampling.py` has the meaning in
plain torch; `Ops.draw` (C++) and `Ops.sample` (Triton) follow it. Between them only the last bit of `exp` may
differ: it changes about one sample in ten million, and one in ten thousand of flat distributions over a whole
vocabulary.

With tensor parallelism each rank has the logits of a shard of the vocabulary. Ranks exchange shards so that
each has some rows whole, samples those, and shares the results (`TensorParallel.map_whole_rows`).

    sampler.py               `Sampler`, for CPUs: the host knows every token before the next step
    device_sampler.py        `DeviceSampler`, for GPUs: sampled ids stay on the device
    logits_processors.py     logit bias, penalties, bad words, allowed ids, grammar masks
    device_state.py, device_penalties.py: sampling state of running requests on the device
"""

from .sampler import Sampler

__all__ = ["Sampler"]
