"""Queue of waiting requests, the order in which requests are served and preempted, and fair sharing.

A flow is all requests of one caller in one priority band. It counts the tokens that steps compute for it, and
the flow with the smallest count is served next: deficit round robin with a quantum of one step, as the
virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). In the long
run all callers get equal numbers of tokens, whatever the sizes of their requests, and a caller that asked for
little is served at once.

A new or returning flow starts at the smallest count of the flows with requests, so that nobody accumulates
credit while idle. It keeps a count above that, so that leaving for a moment does not clear a debt.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

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

    def check(self, *, running: int, present: int) -> None:
        """Assert that the flows count `running` and `present` requests in all."""
        flows = [flow for _, flows in self.bands for flow in flows]
        assert sum(flow.running for flow in flows) == running
        assert sum(flow.present for flow in flows) == present

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


ALL_BANDS, NO_BAND = 1 << 30, -(1 << 30)
"""Values of `better_than` for `WaitingQueue.choose`: consider all waiting requests, or none."""
LIFTED_TOKENS = 64
"""Output tokens that a request makes without being preempted, after ageing let it overtake better bands."""


def least_deserving(request: Request) -> tuple[bool, int, int, float]:
    """Return the sort key for preemption, largest first: in the lowest band, the newest request of the flow
    that runs most.
    """
    return not request.keeps_place, request.flow.band, request.flow.running, request.arrived_at


class WaitingQueue:
    """Waiting requests: bands in order, within a band the flow with the fewest tokens, within a flow by
    arrival.

    Ageing: a band of which no step took a prompt for `ageing_seconds` is lifted by one, for one request. So
    lower bands progress under any load of better ones, at a small cost. A lifted request is not preempted for
    a waiting one before it has made `LIFTED_TOKENS`.

    A fork that waits for its sibling's prompt is kept outside the order, so that it blocks nobody.
    """

    def __init__(self, ageing_seconds: float, flows: Flows, clock: Callable[[], float]) -> None:
        self._ageing_seconds = ageing_seconds
        self._flows = flows
        self._clock = clock
        self._present: dict[str, Request] = {}
        self._aside: dict[str, list[Request]] = {}
        self._standing_aside: set[str] = set()
        """Forks, and requests that wait for blocks from disk."""

    def __len__(self) -> int:
        return len(self._present)

    def push(self, request: Request) -> None:
        self._present[request.request_id] = request
        heappush(request.flow.heap, (request.arrived_at, request))
        request.flow.queued += 1

    def push_aside(self, request: Request, sibling: Request) -> None:
        """Add a fork that waits until `end_fork_wait(sibling)`."""
        self._present[request.request_id] = request
        self._aside.setdefault(sibling.request_id, []).append(request)
        self._standing_aside.add(request.request_id)

    def hold(self, request: Request) -> None:
        """Keep a request, new or queued, outside the order too until `release`."""
        if self._is_present(request) and request.request_id not in self._standing_aside:
            self.take(request)
        self._present[request.request_id] = request
        self._standing_aside.add(request.request_id)

    def release(self, request: Request) -> None:
        if self._is_present(request):
            self._standing_aside.discard(request.request_id)
            self.push(request)

    def awaited_siblings(self) -> list[str]:
        return list(self._aside)

    def end_fork_wait(self, sibling: Request) -> None:
        """Queue the forks of `sibling` like other requests, because its prompt is computed or it is gone."""
        for request in self._aside.pop(sibling.request_id, ()):
            self._standing_aside.discard(request.request_id)
            if self._is_present(request):
                self.push(request)

    def choose(self, prompts: Mapping[Flow, list[Request]], better_than: int) -> tuple[Request | None, bool]:
        """Return the request to serve next, and whether its age lifts it over better bands.

        It is one of the running `prompts` (newest first in each list), or a waiting request of a band below
        `better_than`; None if there is neither.
        """
        best: tuple[float, int, Request] | None = None
        bands = []
        for band, flows in self._flows.bands:
            first: tuple[int, int, float, Request] | None = None
            oldest = float("inf")
            for flow in flows:
                if not (flow.queued or prompts):
                    continue
                request = self._first_of(flow, prompts.get(flow), waiting=band < better_than)
                if request is None:
                    continue
                oldest = min(oldest, request.arrived_at)
                key = flow.tokens, flow.running, request.arrived_at, request
                if first is None or key < first:
                    first = key
            if first is not None:
                bands.append(band)
                since = max(oldest, self._flows.served_at(band))
                place = since + band * self._ageing_seconds, band, first[-1]
                if best is None or place < best:
                    best = place
        return (None, False) if best is None else (best[-1], best[1] > min(bands))

    def _first_of(self, flow: Flow, prompts: list[Request] | None, *, waiting: bool) -> Request | None:
        running = prompts[-1] if prompts else None
        head = self._peek(flow) if waiting and flow.queued else None
        if running is None or head is None:
            return running or head
        return min(running, head, key=lambda request: request.arrived_at)

    def has_starved(self, request: Request) -> bool:
        """Return True if its band was passed over for so long that no request may overtake it any more."""
        band = request.flow.band
        since = max(request.arrived_at, self._flows.served_at(band))
        return self._clock() - since > (LOWEST_BAND + 1 + band) * self._ageing_seconds

    def num_queued(self, better_than: int) -> int:
        """Return the number of queued requests of bands below `better_than`."""
        return sum(flow.queued for band, flows in self._flows.bands if band < better_than for flow in flows)

    def take(self, request: Request) -> None:
        """Remove an admitted request."""
        self._drop(request)
        self._peek(request.flow)

    def discard(self, request: Request) -> None:
        """Remove a request for good. Its heap entry is dropped when it reaches the top, or in a sweep."""
        self._drop(request)
        flow = request.flow
        if len(flow.heap) > 2 * flow.queued + 16:
            flow.heap = [entry for entry in flow.heap if self._is_present(entry[-1])]
            heapify(flow.heap)

    def check(self) -> None:
        """Assert that every waiting request is in exactly one queue."""
        forks = {fork.request_id for group in self._aside.values() for fork in group}
        assert {name for name in forks if name in self._present} <= self._standing_aside
        present = [name for name in self._standing_aside if name in self._present]
        for _, flows in self._flows.bands:
            for flow in flows:
                queued = [entry[-1].request_id for entry in flow.heap if self._is_present(entry[-1])]
                assert len(queued) == flow.queued <= flow.present
                present += queued
        assert sorted(present) == sorted(self._present)

    def _drop(self, request: Request) -> None:
        del self._present[request.request_id]
        if request.request_id in self._standing_aside:
            self._standing_aside.discard(request.request_id)
        else:
            request.flow.queued -= 1

    def _peek(self, flow: Flow) -> Request | None:
        while flow.heap and not self._is_present(flow.heap[0][-1]):
            heappop(flow.heap)
        return flow.heap[0][-1] if flow.heap else None

    def _is_present(self, request: Request) -> bool:
        return self._present.get(request.request_id) is request
