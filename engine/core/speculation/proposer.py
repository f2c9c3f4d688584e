"""Interface of everything that proposes draft tokens: lookups in text, draft models, draft heads.

A proposer guesses; `DraftScheduler` decides whom to ask for how many, `runner/draft_verification.py` which
guesses count. A wrong guess changes the speed and no token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..request import Request

DraftMethod = Literal["ngram", "suffix", "draft_model", "mtp", "eagle3", "medusa"]
"""Methods under the names that vLLM's `--speculative-config` has for them."""


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
