"""Admission by latency targets, over a forecast that is made up."""

from types import SimpleNamespace

import pytest

from llmbox.app.config.entries import LatencyTarget
from llmbox.app.config.settings import Settings
from llmbox.app.engines.queue_model import AdmissionCounts, Forecast
from llmbox.app.errors import ApiError
from llmbox.app.gateway.target_admission import TargetAdmission, check_targets
from llmbox.app.store.record import RequestRecord

TARGET = LatencyTarget(0.5, 0.05)


class Queue(SimpleNamespace):
    """Queue that forecasts 300 ms to the first token and 10 ms a token."""

    def forecast(self, requests):
        return Forecast(
            ttft=0.3,
            tpot=0.01,
            idle_ttft=0.1,
            idle_tpot=0.01,
            ends_every=1.0,
            is_first=False,
            is_behind=True,
            measured_ttft=0.3,
            measured_tpot=0.01,
        )

    def refuse(self, requests):
        self.refused = requests


def test_time_that_a_request_took_to_be_prepared_counts():
    queue = Queue(counts=AdmissionCounts())
    assert check_targets("m", queue, [], TARGET, waited=0.1) is not None
    assert queue.counts.admitted == 1
    with pytest.raises(ApiError, match=r"its first token after 600 ms \(target 500 ms\)") as refused:
        check_targets("m", queue, ["r"], TARGET, waited=0.3)
    assert (refused.value.status, queue.refused) == (429, ["r"])
    assert check_targets("m", queue, [], TARGET, is_awaited=False, waited=0.3) is not None


def test_time_before_the_gateway_counts_against_the_target_but_not_as_the_queues_error():
    """A load of the model counts for neither."""
    told, errors = [], []
    queue = Queue(settle=lambda *times, waited: told.append((*times, waited)) or [], never_met="")
    metrics = SimpleNamespace(record_forecast=lambda record, *times: errors.append(times))
    admission = TargetAdmission(metrics, Settings())
    forecast = queue.forecast([])
    admission.forecasts["r"] = queue, forecast, TARGET
    record = RequestRecord(
        id="r", created=0, model="m", endpoint="chat", http_status=200, ttft_s=10.5, tpot_s=0.02
    )
    admission.settle(record, waited=10.125, model_s=10.0)
    assert told == [(forecast, TARGET, 0.5, 0.02, 0.125)]
    assert errors == [(0.5, 0.425, 0.01)]
