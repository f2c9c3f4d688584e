"""Set-up of the whole suite."""

import os
import signal
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

# One cache of compiled kernels for all test processes and for later runs; also for daemons and engines that
# tests start, whose own cache folders are new each time.
os.environ.setdefault(
    "LLMBOX_KERNEL_CACHE", str(Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}")
)
# Triton reads it as it is imported, by whichever test comes first. Here its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# In the background of a script, and under `nohup`, these are ignored, and children inherit that: daemons and
# commands that tests start must meet Ctrl-C and a closed terminal as a person's do.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# The same examples in every run, and as much time for each as a busy machine needs.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
