"""Sampling: from logits to token ids.

A row's token is a function of that row's logits and its request, bit by bit. Sums over the vocabulary are
sums of integers (`integer_softmax.py`), so neither the neighbours in the batch nor the way a kernel splits
its work can change them. Noise is a function of (seed, position) alone (`philox.py`). Ties go to the lowest
id. Between devices, and between PyTorch and the C++ kernels, only the last bit of `exp` may differ: it
changes about one sample in ten million, and one in ten thousand of flat distributions over a whole
vocabulary.

    sampler.py, draw.py, topk.py        sampling on a CPU
    gpu_sampler.py, draw_async.py       sampling on a GPU, without waiting for the device
    tp_sampler.py, tp_gpu_sampler.py    the same from logits sharded over tensor-parallel ranks
    logits_processors.py                logit bias, penalties, bad words, allowed ids, grammar masks
    device_state.py, device_penalties.py: sampling state of running requests on the device
    logprobs.py                         log-probabilities
"""

from .sampler import Sampler

__all__ = ["Sampler"]
