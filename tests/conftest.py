"""Set-up of the whole suite."""

import gc
import os
import random
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.lanes import FAST, NIGHTLY, ProcessGuard, examples, why_not_fast
from support.time_limit import time_limit

# One cache of compiled kernels for all test processes and for later runs; also for daemons and engines that
# tests start, whose own cache folders are new each time.
os.environ.setdefault(
    "LLMBOX_KERNEL_CACHE", str(Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}")
)
# Triton reads it as it is imported, by whichever test comes first. Here its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Hundreds of processes of this tree are started: without byte code on disk each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Some shells export the size of the terminal that the suite is started from: commands would cut tables to it.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# In the background of a script, and under `nohup`, these are ignored, and children inherit that: daemons and
# commands that tests start must meet Ctrl-C and a closed terminal as a person's do.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# As much time for each example as a busy machine needs. The suite has the same examples in every run, so that
# a change is blamed for its own mistakes alone; `make nightly` draws more of them, and anew.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _PATIENT, derandomize=True, max_examples=examples(100))
# Whether a planted mistake fails a test is all that `make mutate` asks, not its smallest example.
_NO_SHRINKING = (Phase.explicit, Phase.generate)
settings.register_profile("mutate", settings.get_profile("suite"), phases=_NO_SHRINKING)
settings.register_profile("nightly", _PATIENT, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("LLMBOX_TEST_PROFILE", "suite"))


LIMIT = 3600.0 if NIGHTLY else 900.0
"""Seconds for one test with its fixtures, far beyond what any takes on a busy machine."""

_guard = ProcessGuard()
if FAST:
    _guard.install()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if FAST and is_test and why_not_fast(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections. Modules and tests stay: later collections skip them.

    Those are rarer than by default: each would visit all objects of libraries that tests import later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _guard.armed = True
    if (
        not NIGHTLY
    ):  # what a test draws depends on the test alone, not on those that ran before in its process
        seed = zlib.crc32(item.nodeid.encode())
        random.seed(seed)
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.manual_seed(seed)
    try:
        with time_limit(LIMIT):
            return (yield)
    finally:
        _guard.armed = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
    other_lanes = [name for name, out in (("nightly", not NIGHTLY), ("process", FAST), ("slow", FAST)) if out]
    left_out = [item for item in items if any(map(item.get_closest_marker, other_lanes))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
