"""Interface of everything that proposes draft tokens (lookups in text, draft models, draft heads), and the
counts of their drafts.

A proposer guesses; `DraftScheduler` decides whom to ask for how many, `runner/draft_verification.py` which
guesses count. A wrong guess changes the speed and no token.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypedDict

from ...ipc.messages import DraftCounts

if TYPE_CHECKING:
    from ..request import Request

log = logging.getLogger("llmbox.engine")

LOG_SECONDS: Final = 60.0
"""Time between two lines of the log about drafts."""

DraftMethod = Literal["ngram", "suffix", "grammar", "draft_model", "mtp", "eagle3", "medusa"]
"""Methods, most under the names that vLLM's `--speculative-config` has for them."""


class Proposals(NamedTuple):
    """Result of `Proposer.propose`."""

    drafts: list[list[int]]
    """Draft tokens of each request, in order; empty: none."""
    passes: int = 0
    """Number of forward passes that they took; 0: lookups."""
    rows: int = 0
    """Rows of all passes."""
    matches: Sequence[int] = ()
    """Number of tokens that each draft rests on, of a lookup: the longer, the likelier it is right."""


class Proposer(Protocol):
    """Proposer of draft tokens for a batch. One serves a whole engine; it keeps its state of a request under
    the request itself, in weak references.
    """

    @property
    def method(self) -> DraftMethod: ...

    def propose(self, wanted: Sequence["tuple[Request, int]"]) -> Proposals:
        """Propose at most so many tokens after `Request.token_ids`, for each request.

        The prompt of each is computed, exactly its last token is not, and its block table has slots for the
        drafts. The next step verifies them, or some first ones of them, or none.
        """
        ...


class DraftStats(TypedDict):
    """Fields of `EngineStats` about drafts."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    draft_methods: dict[str, DraftCounts]


class AcceptanceCounts:
    """Drafts of one method that were verified."""

    def __init__(self) -> None:
        self.drafts = 0
        """Number of drafts: one request in one step."""
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def read(self) -> DraftCounts:
        return DraftCounts(
            drafts=self.drafts, draft_tokens=self.draft_tokens, accepted_tokens=self.accepted_tokens
        )


class DraftStatistics:
    """Counts of all methods, for `EngineStats` and for the log."""

    def __init__(self, methods: Iterable[DraftMethod], now: float) -> None:
        self.counts = {method: AcceptanceCounts() for method in methods}
        self._stats: DraftStats | None = None
        self._logged = now, 0
        """Time and number of drafts when the log had the counts last."""

    def add(self, method: DraftMethod, drafted: int, accepted: int) -> None:
        """Count a verified draft."""
        self.counts[method].add(drafted, accepted)
        self._stats = None

    def read(self) -> DraftStats:
        """Return the fields of `EngineStats` about drafts."""
        if self._stats is None:
            counts = {str(method): each.read() for method, each in self.counts.items() if each.drafts}
            self._stats = DraftStats(
                drafts=sum(each.drafts for each in counts.values()),
                draft_tokens=sum(each.draft_tokens for each in counts.values()),
                accepted_tokens=sum(each.accepted_tokens for each in counts.values()),
                draft_methods=counts,
            )
        return self._stats

    def log(self, now: float) -> None:
        """Write the acceptance of each method into the log, while there are drafts."""
        drafts = self.read()["drafts"]
        if now - self._logged[0] < LOG_SECONDS or drafts == self._logged[1]:
            return
        self._logged = now, drafts
        log.info(
            "draft tokens accepted so far: %s",
            ", ".join(
                f"{method} {each.accepted_tokens} of {each.draft_tokens}"
                for method, each in self.read()["draft_methods"].items()
            ),
        )
