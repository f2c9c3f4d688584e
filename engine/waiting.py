"""Who is served first, and the queue of requests that are not running."""

from heapq import heapify, heappop, heappush

from .request import Request

LOWEST_BAND = 8


def band(request: Request) -> int:
    """Lower is better, below 0 is premium. Clamped, so that ageing lifts even the lowest in time."""
    return max(-LOWEST_BAND, min(LOWEST_BAND, request.priority))


def least_deserving(request: Request) -> tuple[int, float]:
    """The largest is preempted first: the newest of the lowest band."""
    return band(request), request.arrived_at


class WaitingQueue:
    """Ordered by band, then arrival, with ageing.

    Waiting `ageing_seconds` lifts a request by one band. All age alike, so their order never changes while
    they wait, and a fixed key says it: arrival, put off by the ageing time of the band. A request is only
    overtaken by what arrives within 2 * LOWEST_BAND * ageing_seconds after it, so its wait is bounded.

    A fork that waits for its sibling's prompt stands aside, so that it holds up nobody.
    """

    def __init__(self, ageing_seconds: float) -> None:
        self._ageing_seconds = ageing_seconds
        self._present: dict[str, Request] = {}
        self._heap: list[tuple[float, float, Request]] = []
        self._aside: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._present)

    def urgency(self, request: Request) -> tuple[float, float]:
        """Sort key, smallest first. Unique, because `arrived_at` is."""
        return request.arrived_at + band(request) * self._ageing_seconds, request.arrived_at

    def push(self, request: Request) -> None:
        self._present[request.request_id] = request
        heappush(self._heap, (*self.urgency(request), request))

    def push_aside(self, request: Request, sibling: Request) -> None:
        """Let it wait until `end_fork_wait(sibling)`."""
        self._present[request.request_id] = request
        self._aside.setdefault(sibling.request_id, []).append(request)

    def awaited_siblings(self) -> list[str]:
        return list(self._aside)

    def end_fork_wait(self, sibling: Request) -> None:
        """The sibling's prompt is computed, or the sibling is gone: its forks queue as all others do."""
        for request in self._aside.pop(sibling.request_id, ()):
            if self._is_present(request):
                self.push(request)

    def peek(self) -> Request | None:
        while self._heap and not self._is_present(self._heap[0][-1]):
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        heappop(self._heap)
        del self._present[request.request_id]
        return request

    def discard(self, request: Request) -> None:
        """Take out a request that never comes back. Its heap entry goes when it surfaces, or in a sweep."""
        del self._present[request.request_id]
        if len(self._heap) > 2 * len(self._present) + 16:
            self._heap = [entry for entry in self._heap if self._is_present(entry[-1])]
            heapify(self._heap)

    def check(self) -> None:
        """Prove that every waiting request stands in exactly one place."""
        queued = [entry[-1] for entry in self._heap] + [
            fork for forks in self._aside.values() for fork in forks
        ]
        present = [request.request_id for request in queued if self._is_present(request)]
        assert sorted(present) == sorted(self._present)

    def _is_present(self, request: Request) -> bool:
        return self._present.get(request.request_id) is request
