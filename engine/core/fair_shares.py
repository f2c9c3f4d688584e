"""Fair sharing of the engine between callers, within priority bands.

A flow is all requests of one caller in one band. It counts the tokens that steps compute for it, and the flow
with the smallest count is served next: deficit round robin with a quantum of one step, as the virtual token
counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). In the long run all callers
get equal numbers of tokens, whatever the sizes of their requests, and a caller that asked for little is
served at once.

A new or returning flow starts at the smallest count of the flows with requests, so that nobody accumulates
credit while idle. It keeps a count above that, so that leaving for a moment does not clear a debt.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .request import Request
from .step import ScheduledRequest

LOWEST_BAND = 8


def band_of(request: Request) -> int:
    """Return the priority clamped to +-`LOWEST_BAND`. Lower is served first, below 0 is premium. The clamp
    lets ageing lift even the lowest band in bounded time.
    """
    return max(-LOWEST_BAND, min(LOWEST_BAND, request.priority))


def is_premium(request: Request) -> bool:
    return request.priority < 0


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one caller in one band, and the tokens computed for them."""

    tenant: str
    band: int
    tokens: int = 0
    """Virtual counter: tokens computed for the flow, plus the count that it was given on entry."""
    present: int = 0
    """Number of requests that wait or run."""
    running: int = 0
    queued: int = 0
    """Number of requests that can be admitted: waiting, and not for a sibling's prompt."""
    heap: list[tuple[float, Request]] = field(default_factory=list)
    """Queued requests by arrival, with stale entries of removed ones; see `WaitingQueue`."""


class Flows:
    """Flows by band and caller. It is the only writer of their counters, except `queued` and `heap`."""

    def __init__(self) -> None:
        self._bands: dict[int, dict[str, Flow]] = {}
        self._served_at: dict[int, float] = {}
        self._number = 0

    @property
    def bands(self) -> Iterable[tuple[int, Iterable[Flow]]]:
        return ((band, flows.values()) for band, flows in self._bands.items())

    def num_present(self) -> int:
        return sum(flow.present > 0 for flows in self._bands.values() for flow in flows.values())

    def has_running(self, band: int) -> bool:
        """Return True if a request of this band or a worse one runs."""
        return any(
            flow.running for each, flows in self._bands.items() if each >= band for flow in flows.values()
        )

    def served_at(self, band: int) -> float:
        """Return the clock when a step last took a prompt of this band; far in the past for a new band."""
        return self._served_at.get(band, -1e300)

    def enter(self, request: Request) -> None:
        band = band_of(request)
        flows = self._bands.setdefault(band, {})
        flow = flows.get(request.tenant)
        if flow is None:
            flow = flows[request.tenant] = Flow(request.tenant, band)
            self._number += 1
        if not flow.present:
            flow.tokens = max(
                flow.tokens, min((each.tokens for each in flows.values() if each.present), default=0)
            )
        flow.present += 1
        request.flow = flow

    def leave(self, request: Request) -> None:
        """Remove a request from its flow. Idle flows are deleted once the others have caught up with them."""
        flow = request.flow
        flow.present -= 1
        if flow.present:
            return
        flows = self._bands[flow.band]
        least = min((each.tokens for each in flows.values() if each.present), default=None)
        for each in list(flows.values()):
            if not each.present and (least is None or each.tokens <= least):
                del flows[each.tenant]
                self._number -= 1
        if not flows:
            del self._bands[flow.band]
            self._served_at.pop(flow.band, None)

    def charge(self, rows: Iterable[ScheduledRequest]) -> None:
        """Charge flows for the tokens of a step. Tokens that are computed again after a preemption are not
        charged twice. A single flow is not charged, because there is nobody to share with.
        """
        if self._number < 2:
            return
        for row in rows:
            request = row.request
            start, end = row.start, row.start + row.num_tokens
            start = max(start, request.num_charged)
            if start < end:
                request.flow.tokens += end - start
                request.num_charged = end

    def pay(self, request: Request, tokens: int) -> None:
        """Charge the request's flow for tokens that another request computes again because of it."""
        request.flow.tokens += tokens

    def note_served(self, request: Request, now: float) -> None:
        self._served_at[request.flow.band] = now
