"""Admission by latency targets: requests that would miss their targets are refused on arrival.

With `limits.admission = "slo"` each request is forecast by the measured queue of its model
(`engines/queue_model.py`) and compared with the model's entry in `usage.targets`.
"""

import logging
import time
from collections.abc import Sequence

from llmbox.engine.ipc.messages import AddRequest

from ..config.entries import LatencyTarget, find_target
from ..config.settings import Settings
from ..engines.queue_model import Forecast, QueueModel, missed_targets
from ..errors import ApiError
from ..metrics import Metrics
from ..security.security import BACKGROUND_PRIORITY, tier_of
from ..store.record import RequestRecord
from ..util.formatting import span
from .generation import Generation

log = logging.getLogger("llmbox.gateway")


class TargetAdmission:
    """Check of requests before they are submitted, and of its forecasts when they have ended."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self._metrics = metrics
        self.forecasts: dict[str, tuple[QueueModel, Forecast, LatencyTarget]] = {}
        """Forecasts of open requests, by the request's id."""
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Apply reloaded settings."""
        self.targets = settings.usage.targets if settings.limits.admission == "slo" else ()
        """Targets that requests are admitted by; empty: all are."""

    def check(self, generation: Generation, requests: Sequence[AddRequest]) -> None:
        """Raise ApiError 429 for a request that would miss its targets.

        Embeddings have none, and models whose engines do not tell their steps are left to the queue's limit.
        """
        name, queue = generation.model.name, generation.model.supervisor.queue
        target = find_target(self.targets, name)
        if target is None or generation.params.pooling is not None:
            return
        is_awaited, tier = generation.priority < BACKGROUND_PRIORITY, tier_of(generation.priority)
        try:
            clock = generation.clock
            # Waiting for a load is not the queue's: whoever had it loaded would be refused for it.
            waited = max(0.0, time.monotonic() - clock.arrived - clock.model_s) if clock.arrived else 0.0
            forecast = check_targets(name, queue, requests, target, is_awaited=is_awaited, waited=waited)
        except ApiError:
            self._metrics.record_admission(name, tier, "refused")
            raise
        if forecast is not None:
            self._metrics.record_admission(name, tier, "admitted")
            self.forecasts[generation.id] = queue, forecast, target

    def settle(self, record: RequestRecord, waited: float, model_s: float) -> None:
        """Compare a request that has ended with its forecast. `waited`: seconds before the gateway took it,
        of which `model_s` for its model to be loaded, which is not the queue's.
        """
        if (admitted := self.forecasts.pop(record.id, None)) is None:
            return
        queue, forecast, target = admitted
        ttft = None if record.ttft_s is None else record.ttft_s - model_s
        _note_never_met(queue, forecast, target, record, ttft)
        queued = max(0.0, waited - model_s)
        if queue.settle(forecast, target, ttft, record.tpot_s, waited=queued):
            self._metrics.record_admission(record.model, record.tier, "missed")
        self._metrics.record_forecast(record, ttft, forecast.ttft + queued, forecast.tpot)


def check_targets(
    name: str,
    queue: QueueModel,
    requests: Sequence[AddRequest],
    target: LatencyTarget,
    *,
    is_awaited: bool = True,
    waited: float = 0.0,
) -> Forecast | None:
    """Raise ApiError 429 if requests that come together would miss the targets. Returns their forecast; None
    where no step was measured.

    The first request of its class is always admitted: targets that cannot be met are then served one by one.
    `is_awaited`: somebody waits for the first token; a batch has the target of tokens alone. `waited`:
    seconds that a request took until here, to be tokenized behind others of its burst.
    """
    forecast = queue.forecast(requests)
    if forecast is None:
        return None
    missed = [each for each in forecast.missed(target, waited) if is_awaited or each != "ttft"]
    if not missed or forecast.is_first:
        queue.counts.admitted += 1
        return forecast
    queue.refuse(requests)
    raise _too_late(name, forecast, target, missed, waited)


def _too_late(
    name: str, forecast: Forecast, target: LatencyTarget, missed: Sequence[str], waited: float
) -> ApiError:
    """Error 429 of a request that would miss these targets."""
    reasons = {
        "ttft": f"its first token after {span(forecast.ttft + waited)} (target {span(target.ttft)})",
        "tpot": f"a token every {span(forecast.tpot)} (target {span(target.tpot)})",
    }
    seconds = forecast.seconds_to_try(target)
    return ApiError(
        429,
        f"{name} is too busy for its latency targets: a request now would have "
        f"{' and '.join(reasons[each] for each in missed)}. Try again in {seconds} s.",
        code="latency_target_missed",
        type="rate_limit_error",
        headers={"Retry-After": str(seconds)},
    )


def _note_never_met(
    queue: QueueModel, forecast: Forecast, target: LatencyTarget, record: RequestRecord, ttft: float | None
) -> None:
    """Record that a request missed its target although nothing kept it waiting. Logged once for each target.

    A forecast alone proves nothing: it is too long for a batch size that no step has had yet.
    """
    missed = missed_targets(ttft, record.tpot_s, target)
    if not missed:
        queue.never_met = ""
    late = [each for each in missed if each in forecast.never_met(target)]
    if not forecast.is_first or not late:
        return
    reasons = {
        "ttft": f"its first token came after {span(ttft)} (target {span(target.ttft)})",
        "tpot": f"a token came every {span(record.tpot_s)} (target {span(target.tpot)})",
    }
    queue.never_met = (
        f"the latency targets cannot be met: of a prompt of {record.prompt_tokens} tokens that waited for no "
        f"other {' and '.join(reasons[each] for each in late)}; such requests are served one at a time"
    )
    if queue.warned_of != target:
        queue.warned_of = target
        log.warning("%s: %s (usage.targets)", record.model, queue.never_met)
