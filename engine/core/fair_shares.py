"""Fair shares of the engine between callers, within bands of priority.

Requests of one caller in one band are a flow. A flow counts the tokens that steps compute for it, and the
flow with the fewest is served next: deficit round robin whose quantum is one step, as the virtual token
counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). So equal callers get equal
tokens in the long run, whatever the sizes of their requests, and one that asked for little is served at
once.

A flow that begins or comes back starts at the least count of those that are present: nobody saves up a share
while away. It keeps what it had above that, so that leaving for a moment pays no debt.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .request import Request
from .step import ScheduledRequest

LOWEST_BAND = 8


def band_of(request: Request) -> int:
    """Lower is better, below 0 is premium. Clamped, so that ageing lifts even the lowest in time."""
    return max(-LOWEST_BAND, min(LOWEST_BAND, request.priority))


def is_premium(request: Request) -> bool:
    return request.priority < 0


@dataclass(slots=True, eq=False)
class Flow:
    tenant: str
    band: int
    tokens: int = 0
    """Computed for it, and what it was given on entry."""
    present: int = 0
    """Requests that wait or run."""
    running: int = 0
    queued: int = 0
    """Requests that could be admitted: they wait, and for no sibling."""
    heap: list[tuple[float, Request]] = field(default_factory=list)
    """Queued requests by arrival, with some that are gone; see `WaitingQueue`."""


class Flows:
    """The only writer of what flows count, but for their queues."""

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
        """In this band or a worse one."""
        return any(
            flow.running for each, flows in self._bands.items() if each >= band for flow in flows.values()
        )

    def served_at(self, band: int) -> float:
        """When a step last took a prompt of this band; of a new band: never."""
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
        """Flows without requests are forgotten once the others have caught up with them."""
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
        """For what a step computes. What preemption makes it compute again is not charged again. One alone is
        charged nothing: it would share with nobody.
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
        """For what is computed again because of it."""
        request.flow.tokens += tokens

    def note_served(self, request: Request, now: float) -> None:
        self._served_at[request.flow.band] = now
