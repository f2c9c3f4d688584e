"""Hit counts of cached prefixes, for the dashboards."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ...ipc.messages import PrefixUse

REMEMBERED_USES: Final = 256
MAX_REPORTED: Final = 20


class PrefixUses:
    """Hits by the chain hash of a prefix's last block. The least recently hit entry is dropped first."""

    def __init__(self, limit: int = REMEMBERED_USES) -> None:
        self._limit = limit
        self._uses: OrderedDict[bytes, PrefixUse] = OrderedDict()

    def note(self, chain_hash: bytes, blocks: int, block_size: int, request_id: str) -> None:
        before = self._uses.pop(chain_hash, None)
        self._uses[chain_hash] = PrefixUse(
            prefix=chain_hash.hex()[:12],
            tokens=blocks * block_size,
            blocks=blocks,
            hits=1 if before is None else before.hits + 1,
            last_request=request_id,
        )
        if len(self._uses) > self._limit:
            self._uses.popitem(last=False)

    def top(self, is_here: Callable[[bytes], bool], count: int = MAX_REPORTED) -> list[PrefixUse]:
        """Return the `count` prefixes that saved most tokens, among those for which `is_here` is true."""
        here = [use for chain_hash, use in self._uses.items() if is_here(chain_hash)]
        return sorted(here, key=lambda use: use.hits * use.tokens, reverse=True)[:count]
