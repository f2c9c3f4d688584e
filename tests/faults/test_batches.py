"""A batch outlives the daemon: what had no answer when it was killed is asked again by the next one."""

import signal

import pytest

from support.cli_box import PATIENCE, Box, box, until
from support.deferred_module import DeferredModule
from support.fake_engine import GO_FILE

anthropic = DeferredModule("anthropic")

__all__ = ["box"]
ASKED = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


def client_of(box: Box) -> "anthropic.Anthropic":
    assert box.running is not None
    url = f"http://127.0.0.1:{box.running.port}"
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_after_a_restart(box: Box, end: signal.Signals) -> None:
    folder = box.model(hold_at=2)
    daemon = box.serve(folder, LLMBOX_SERVER_DRAIN_TIMEOUT="0.5")
    with client_of(box) as client:
        bad = {"custom_id": "bad", "params": ASKED | {"max_tokens": -1}}
        good = [{"custom_id": str(n), "params": ASKED} for n in range(3)]
        batch = client.messages.batches.create(requests=[bad, *good])
        until(lambda: len(box.api("requests?limit=10")["in_flight"]) == 3)
    daemon.send_signal(end)
    daemon.wait(PATIENCE)
    (folder / GO_FILE).touch()
    box.serve(folder)
    with client_of(box) as client:
        until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
        results = {each.custom_id: each.result.type for each in client.messages.batches.results(batch.id)}
    assert results == {"bad": "errored"} | dict.fromkeys("012", "succeeded")
