"""Set-up of the whole suite."""

import os
import tempfile
from pathlib import Path

# One cache of compiled kernels for all test processes and for later runs; also for daemons and engines that
# tests start, whose own cache folders are new each time.
os.environ.setdefault(
    "LLMBOX_KERNEL_CACHE", str(Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}")
)
# Triton reads it as it is imported, by whichever test comes first. Here its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
