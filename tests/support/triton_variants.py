"""Which kernels would be compiled, on a machine without a GPU: launches are noted and do nothing.

A variant is what Triton compiles anew for: constants, dtypes, and what it specialises on of numbers and
addresses.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from support.triton_interpreter import turn_on

turn_on()

Variant = tuple[object, ...]


@contextmanager
def noted_variants(
    capability: tuple[int, int] = (9, 0), multiprocessors: int = 132
) -> Iterator[set[Variant]]:
    """New memory is ones meanwhile: what no kernel has written can still be read as a result."""
    from triton.runtime.interpreter import InterpretedFunction

    from llmbox.kernels.triton.linear import tile_config as tiles

    seen: set[Variant] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        seen.add(variant(self, args, kwargs))

    ones, ones_like = torch.ones, torch.ones_like
    with (
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(tiles, "capability", return_value=capability),
        mock.patch.object(tiles, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(torch, "empty", ones),
        mock.patch.object(torch, "empty_like", ones_like),
    ):
        yield seen


def variant(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    never = function.kwargs.get("do_not_specialize") or []
    not_aligned = function.kwargs.get("do_not_specialize_on_alignment") or []
    parameters = inspect.signature(function.fn).parameters
    parts: list[object] = [function.__name__]
    for name, value in sorted(given.items()):
        plain = name in never, name in not_aligned
        constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        parts.append((name, value if constant else specialised(value, *plain)))
    return tuple(parts)


def specialised(value: object, never: bool, not_aligned: bool) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0 or never or not_aligned
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value)
    if never:
        return int
    if value == 1:
        return 1
    return int, value % 16 == 0 and not not_aligned
