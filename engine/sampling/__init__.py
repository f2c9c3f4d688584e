"""From logits to token ids: the only place of the engine that makes choices.

A row's result is a function of that row's logits and its request, bit by bit: sums over the vocabulary are
sums of integers (`integer_softmax.py`), so neither the neighbours in the batch nor the way a kernel splits
its work can change them, and noise comes from (seed, position) alone. Equal logits are ordered by lowest
id. From one device to another, and from PyTorch to the C++ kernels, only the last bit of `exp` may differ:
it moves a draw about once in ten million, of flat distributions over a whole vocabulary once in some ten
thousand.
"""

from .sampler import Sampler

__all__ = ["Sampler"]
