"""Loading of kernel libraries: a prebuilt one, or one compiled on this machine."""

import ctypes
import logging
from functools import cache
from itertools import pairwise

from .backend import CPUBackend
from .build import NativeUnavailable, find_compiler, find_prebuilt, layout, library_path, native_obtainable
from .ffi import DeniedInstructions, open_library
from .isa import Level, usable_levels

log = logging.getLogger(__name__)

PREBUILT, COMPILED = "prebuilt", "compiled here"
PORTABLE_CPU = "cpu exact"
"""Name for the best level whose bits are those of all others, over int8 keys and values."""
OTHER_BITS = frozenset({"cpu amx"})
"""Attention over int8 walks chunks of another length there (native/attention/attention_dot.h)."""


def backend_name(level: Level) -> str:
    return f"cpu {level.name}"


@cache
def load_backend(name: str) -> CPUBackend:
    """Load a backend. `name` is "cpu" for the best level of this machine, PORTABLE_CPU, or a level's. Raises
    NativeUnavailable.
    """
    levels = {backend_name(level): level for level in usable_levels()}
    if name == "cpu":
        return best_backend(list(levels))
    if name == PORTABLE_CPU:
        return best_backend([level for level in levels if level not in OTHER_BITS])
    if name not in levels:
        raise NativeUnavailable(f"this machine cannot run {name!r}, only {', '.join(levels)}")
    level = levels[name]
    library, origin = open_level(level)
    log.info("CPU kernels: %s, %s", level.name, origin)
    return CPUBackend(library, name, layout(level), origin)


def best_backend(names: list[str]) -> CPUBackend:
    """Load the first level that exists and that the system allows: AMX has to be requested."""
    if not native_obtainable():
        find_compiler()  # raises
    problems = list[str]()
    for name, next_best in pairwise(names):
        try:
            backend = load_backend(name)
            break
        except NativeUnavailable as error:
            log.warning("no kernels for %s, %s instead: %s", name, next_best, error)
            problems.append(str(error))
    else:
        backend = load_backend(names[-1])
    backend.problem = "; ".join(problems)
    return backend


def open_level(level: Level) -> tuple[ctypes.CDLL, str]:
    """Open the library for `level` and say where it is from. Raises NativeUnavailable."""
    path, problem = find_prebuilt(level)
    if path:
        try:
            return open_library(path), PREBUILT
        except DeniedInstructions:
            raise  # a compiled library would be denied too
        except NativeUnavailable as error:
            problem = str(error)
    if problem:
        log.warning("%s: one is compiled here; install llmbox again", problem)
    return open_library(library_path(level)), COMPILED
