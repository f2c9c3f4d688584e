"""Who is served first, and the queue of requests that are not running."""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

from .fair_shares import LOWEST_BAND, Flow, Flows
from .request import Request

ALL_BANDS, NO_BAND = 1 << 30, -(1 << 30)
"""For `WaitingQueue.choose`."""
LIFTED_TOKENS = 64
"""Output tokens that a request may make undisturbed after its band's wait let it go before better bands."""


def least_deserving(request: Request) -> tuple[bool, int, int, float]:
    """The largest is preempted first: in the lowest band, the newest of the flow that runs most."""
    return not request.keeps_place, request.flow.band, request.flow.running, request.arrived_at


class WaitingQueue:
    """Bands in order, in each band the flow that had least, in each flow the first to arrive.

    A band that steps take no prompt of for `ageing_seconds` is lifted by one, for one request: lower bands
    progress under any load of better ones, and are worth little of it. What is lifted is not preempted for a
    place before it has made `LIFTED_TOKENS`.

    A fork that waits for its sibling's prompt stands aside, so that it holds up nobody.
    """

    def __init__(self, ageing_seconds: float, flows: Flows, clock: Callable[[], float]) -> None:
        self._ageing_seconds = ageing_seconds
        self._flows = flows
        self._clock = clock
        self._present: dict[str, Request] = {}
        self._aside: dict[str, list[Request]] = {}
        self._standing_aside: set[str] = set()

    def __len__(self) -> int:
        return len(self._present)

    def push(self, request: Request) -> None:
        self._present[request.request_id] = request
        heappush(request.flow.heap, (request.arrived_at, request))
        request.flow.queued += 1

    def push_aside(self, request: Request, sibling: Request) -> None:
        """Let it wait until `end_fork_wait(sibling)`."""
        self._present[request.request_id] = request
        self._aside.setdefault(sibling.request_id, []).append(request)
        self._standing_aside.add(request.request_id)

    def awaited_siblings(self) -> list[str]:
        return list(self._aside)

    def end_fork_wait(self, sibling: Request) -> None:
        """The sibling's prompt is computed, or the sibling is gone: its forks queue as all others do."""
        for request in self._aside.pop(sibling.request_id, ()):
            self._standing_aside.discard(request.request_id)
            if self._is_present(request):
                self.push(request)

    def choose(self, prompts: Mapping[Flow, list[Request]], better_than: int) -> Request | None:
        """Who is served next: one of the running `prompts`, newest first in each list, or a waiting request
        of a band below `better_than`.
        """
        best: tuple[float, int, Request] | None = None
        bands = []
        for band, flows in self._flows.bands:
            first: tuple[int, int, float, Request] | None = None
            oldest = float("inf")
            for flow in flows:
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
        if best is None:
            return None
        _, band, request = best
        if band > min(bands):
            request.num_protected = request.num_output + LIFTED_TOKENS
        return request

    def _first_of(self, flow: Flow, prompts: list[Request] | None, *, waiting: bool) -> Request | None:
        running = prompts[-1] if prompts else None
        head = self._peek(flow) if waiting and flow.queued else None
        if running is None or head is None:
            return running or head
        return min(running, head, key=lambda request: request.arrived_at)

    def has_starved(self, request: Request) -> bool:
        """Whether its band was passed over for so long that nobody may overtake it any more."""
        band = request.flow.band
        since = max(request.arrived_at, self._flows.served_at(band))
        return self._clock() - since > (LOWEST_BAND + 1 + band) * self._ageing_seconds

    def num_queued(self, better_than: int) -> int:
        """Requests of bands below that which could be admitted."""
        return sum(flow.queued for band, flows in self._flows.bands if band < better_than for flow in flows)

    def take(self, request: Request) -> None:
        """It is admitted."""
        self._drop(request)
        self._peek(request.flow)

    def discard(self, request: Request) -> None:
        """Take out a request that never comes back. Its heap entry goes when it surfaces, or in a sweep."""
        self._drop(request)
        flow = request.flow
        if len(flow.heap) > 2 * flow.queued + 16:
            flow.heap = [entry for entry in flow.heap if self._is_present(entry[-1])]
            heapify(flow.heap)

    def check(self) -> None:
        """Prove that every waiting request stands in exactly one place."""
        forks = [fork for group in self._aside.values() for fork in group]
        present = [fork.request_id for fork in forks if self._is_present(fork)]
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
