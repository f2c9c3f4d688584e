"""Table of prompt prefixes that engines computed: how much of a prompt an engine has in its prefix cache, and
which of several replicas has most.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

from llmbox.engine.ipc.messages import AddRequest

MOST_BLOCKS: Final = 256
"""Maximum number of prompt blocks that are hashed: longer prefixes do not change the choice."""


def block_hashes(request: AddRequest, block_size: int, most: int = MOST_BLOCKS) -> list[bytes]:
    """Hash the first full blocks of a prompt, at most `most`, as the engine's prefix cache does.

    Each adapter has a separate chain. Images are not hashed: prompts that differ in them alone go to the
    same replica, which is not an error.
    """
    parent = sha256((request.cache_namespace + request.adapter).encode()).digest()
    whole = min(len(request.prompt_ids) // block_size, most)
    hashes = []
    for block in range(whole):
        ids = request.prompt_ids[block * block_size : (block + 1) * block_size]
        parent = sha256(parent + array("I", ids).tobytes()).digest()
        hashes.append(parent)
    return hashes


class PrefixTable:
    """Replicas that were sent each block, least recently used blocks forgotten first."""

    def __init__(self, imbalance: int = 8, most_blocks: int = 200_000) -> None:
        """`imbalance`: requests that a replica may have more than the least loaded one and still be chosen
        for its prefix.
        """
        self.imbalance = imbalance
        self._most_blocks = most_blocks
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def choose(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """Return the replica for a prompt. `loads`: open requests of each replica, of which there is one."""
        least = min(loads.values())
        near = {name: load for name, load in loads.items() if load <= least + self.imbalance}
        matched = self._matched(hashes, near)
        longest = max(matched.values(), default=0)
        if longest:
            best = [name for name, blocks in matched.items() if blocks == longest]
        else:
            best = [name for name, load in loads.items() if load == least]
        return min(best, key=lambda name: (loads[name], self._sizes.get(name, 0), name))

    def count_known(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Return the blocks of a prefix that were sent to a replica before."""
        return self._matched(hashes, {replica: 0}).get(replica, 0)

    def record(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Note that a replica computes these blocks."""
        for each in hashes:
            holders = self._holders.setdefault(each, set())
            self._holders.move_to_end(each)
            if replica not in holders:
                holders.add(replica)
                self._sizes[replica] = self._sizes.get(replica, 0) + 1
        while len(self._holders) > self._most_blocks:
            _, holders = self._holders.popitem(last=False)
            for name in holders:
                self._sizes[name] -= 1

    def forget(self, replica: str) -> None:
        """Forget the blocks of a replica that is gone."""
        if self._sizes.pop(replica, None) is None:
            return
        for each in [each for each, holders in self._holders.items() if replica in holders]:
            self._holders[each].discard(replica)
            if not self._holders[each]:
                del self._holders[each]

    def replicas(self) -> set[str]:
        return set(self._sizes)

    def _matched(self, hashes: Sequence[bytes], names: Mapping[str, int]) -> dict[str, int]:
        matched: dict[str, int] = {}
        left = set(names)
        for count, each in enumerate(hashes, 1):
            left &= self._holders.get(each, set())
            if not left:
                break
            matched |= dict.fromkeys(left, count)
        return matched
