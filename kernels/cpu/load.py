"""From a level's name to a backend that is ready: compile or find the library, open it."""

import logging
from functools import cache
from itertools import pairwise

from .backend import Backend
from .build import NativeUnavailable, find_compiler, layout, library_path
from .levels import Level, usable_levels
from .native import open_library

log = logging.getLogger(__name__)


def backend_name(level: Level) -> str:
    return f"cpu {level.name}"


@cache
def load_backend(name: str) -> Backend:
    """`name` is "cpu" for the best of this machine, or a level's. Raises NativeUnavailable."""
    levels = {backend_name(level): level for level in usable_levels()}
    if name == "cpu":
        return best_backend(list(levels))
    if name not in levels:
        raise NativeUnavailable(f"this machine cannot run {name!r}, only {', '.join(levels)}")
    return Backend(open_library(library_path(levels[name])), name, layout(levels[name]))


def best_backend(names: list[str]) -> Backend:
    """The first that the compiler knows and the system allows: AMX has to be asked for, and may be denied."""
    find_compiler()
    for name, next_best in pairwise(names):
        try:
            return load_backend(name)
        except NativeUnavailable as error:
            log.warning("no kernels for %s, %s instead: %s", name, next_best, error)
    return load_backend(names[-1])
