"""Import of the hub's own client, late (0.3 s) and only here, with its unasked requests switched off.

By default it fetches a list of programs that may have started this process (`/api/agent-harnesses`), and
names the one it finds and the version of torch in every request.
"""

import os

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read by the import below, and by child processes

from huggingface_hub import HfApi, constants, errors, get_token

constants.HF_HUB_DISABLE_TELEMETRY = True  # something else in this process may have imported it before

__all__ = ["HfApi", "errors", "get_token"]
