"""The hub's own client as a fresh process imports it."""

import os
import subprocess
import sys

SCRIPT = """
import os
from llmbox.app.hub.repo_files import import_client
client = import_client()
print(client.constants.HF_HUB_DISABLE_TELEMETRY, os.environ["HF_HUB_DISABLE_TELEMETRY"])
print(client.HfApi.__name__, client.get_token.__name__, client.errors.GatedRepoError.__name__)
"""


def test_the_client_has_its_telemetry_off_and_what_is_read_of_it():
    environ = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.split() == ["True", "1", "HfApi", "get_token", "GatedRepoError"]
