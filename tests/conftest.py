"""Set-up of the whole suite."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One cache of compiled kernels for all test processes and for later runs; also for daemons and engines that
# tests start, whose own cache folders are new each time.
os.environ.setdefault(
    "LLMBOX_KERNEL_CACHE", str(Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}")
)
# Triton reads it as it is imported, by whichever test comes first. Here its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Some shells export the size of the terminal that the suite is started from: commands would cut tables to it.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# In the background of a script, and under `nohup`, these are ignored, and children inherit that: daemons and
# commands that tests start must meet Ctrl-C and a closed terminal as a person's do.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# As much time for each example as a busy machine needs. The suite has the same examples in every run, so that
# a change is blamed for its own mistakes alone; `make nightly` draws anew.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _PATIENT, derandomize=True)
settings.register_profile("nightly", _PATIENT, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("LLMBOX_TEST_PROFILE", "suite"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
