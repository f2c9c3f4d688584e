"""`store: true`: whether it can be honoured, and where the answer then goes. Nothing is stored without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...errors import ApiError
from ...store.stored import Kind, StoredAnswer, StoredAnswers
from .context import Call
from .sampling import invalid

NOT_STORED = "The answer could not be stored: too much waits for the disk."
_TOKEN_BYTES, _LOGPROB_BYTES = 16, 2000  # of a token in an answer, about
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # as OpenAI has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The place of one request's answer."""

    answers: StoredAnswers
    kind: Kind
    owner: str
    input: Sequence[Any]
    metadata: Mapping[str, str]
    size: int
    """Bytes of the request."""
    previous: str = ""

    @classmethod
    def wanted(
        cls,
        call: Call,
        kind: Kind,
        body: Any,
        items: Sequence[Any],
        previous: str = "",
    ) -> "Store | None":
        """None where `body` does not ask for it. Raises ApiError 400 where it cannot be honoured."""
        if not body.store:
            return None
        if not call.services.settings.requests.store:
            raise ApiError(
                400,
                "The value of 'store' is not supported. Storing is switched off here: requests.store.",
                code="unsupported_parameter",
                param="store",
            )
        metadata = body.metadata or {}
        check_metadata(metadata)
        return cls(
            answers=call.services.stored,
            kind=kind,
            owner=call.services.security.owner_id(call.caller),
            input=items,
            metadata=metadata,
            size=len(call.body),
            previous=previous,
        )

    def put(
        self,
        answer: Any,
        created: float,
        tokens: int,
        *,
        logprobs: bool = False,
        private: Mapping[str, Any] | None = None,
    ) -> bool:
        """`answer` has an `id` and a `model`, and is not changed any more; `private` is kept beside it.

        False: there is no room.
        """
        kept = StoredAnswer(
            kind=self.kind,
            owner=self.owner,
            id=answer.id,
            created=created,
            model=answer.model,
            previous=self.previous,
            metadata=self.metadata,
            input=self.input,
            answer=answer if private is None else {**msgspec.to_builtins(answer), **private},
        )
        return self.answers.put(kept, self.size + tokens * (_LOGPROB_BYTES if logprobs else _TOKEN_BYTES))


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises ApiError 400."""
    if len(metadata) > _MOST_PAIRS:
        raise invalid("metadata", f"at most {_MOST_PAIRS} pairs are allowed")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise invalid(
                "metadata",
                f"keys have at most {_LONGEST_KEY} characters, values {_LONGEST_VALUE}",
            )
