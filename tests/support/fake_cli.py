"""The real command line and daemon around the fake engine: `python -P tests/support/fake_cli.py ARGS`.

A daemon that it starts in the background is this program again. `FAKE_NVML` puts made-up GPUs
into it: `fine`, `hang` (every read takes 10 minutes), `lost` or `errors`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.app import admin_client as client
from llmbox.app.cli.root import main
from llmbox.app.cli.server import daemon_starter as starter
from llmbox.app.lifecycle.program import Program

PATIENCE = 180.0
"""Seconds: what a person would not wait for, but tests on a machine that others fill must."""


COMMAND = [sys.executable, "-P", __file__]


def fake_parts():
    from llmbox.app.daemon.compose import DaemonParts
    from llmbox.app.engines.engine_process import EngineQueries
    from llmbox.app.store import writer as request_log
    from llmbox.app.telemetry.telemetry import Poller
    from llmbox.app.text.tokenizer.text_loader import load_model_text
    from support.fake_engine import fake_launch

    request_log._OPENS_WITHIN_S = PATIENCE
    EngineQueries.blocks.__defaults__ = (PATIENCE,)
    if os.environ.get("FAKE_NVML") != "hang":
        Poller.__init__.__kwdefaults__["timeout"] = PATIENCE
    return DaemonParts(fake_launch(), load_model_text, fake_gpus(os.environ.get("FAKE_NVML")))


def fake_gpus(kind):
    if kind is None:
        return None
    from threading import Event

    from llmbox.app.telemetry.gpus import GpuReader
    from support.fake_nvml import NUMBERS, FakeGpu, FakeNvml

    gpus = [FakeGpu(lost=kind == "lost"), FakeGpu()]
    refused = frozenset(NUMBERS) if kind == "errors" else frozenset()
    return GpuReader(FakeNvml(gpus, hang=Event() if kind == "hang" else None, not_available=refused))


def import_all():
    """Import what a daemon and the usual commands import, but no library that reads the environment then."""
    import importlib

    from llmbox.app.cli.root import COMMANDS

    for name in {place.partition(":")[0] for place, _ in COMMANDS.values()}:
        importlib.import_module(name, "llmbox.app.cli")
    for name in ("daemon.run", "daemon.serve", "daemon.compose", "store.database", "telemetry.telemetry"):
        importlib.import_module(f"llmbox.app.{name}")
    importlib.import_module("support.fake_engine")
    assert not {"huggingface_hub", "torch"} & sys.modules.keys()


def run():
    client.TIMEOUT = starter.START_TIMEOUT = PATIENCE
    client.Client.post.__defaults__ = (PATIENCE,)
    main(program=Program(command=COMMAND, parts=fake_parts))


if __name__ == "__main__":
    run()
