"""One question for the map of blocks at a time, whoever wants it."""

import asyncio
from collections.abc import Callable
from typing import Final

from llmbox.engine.messages import AskBlocks, BlockMap

PATIENCE_S: Final = 2.0
"""A step may take longer: then there is no map this time."""


class BlockAsker:
    def __init__(self, tell: Callable[[AskBlocks], None]) -> None:
        self._tell = tell
        self._waiting: asyncio.Future[BlockMap | None] | None = None

    async def ask(self, patience: float = PATIENCE_S) -> BlockMap | None:
        """None if the engine is gone or does not answer in time; its late answer serves the next who asks."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
            self._tell(AskBlocks())
        try:
            return await asyncio.wait_for(asyncio.shield(self._waiting), patience)
        except TimeoutError:
            return None

    def answered(self, found: BlockMap | None) -> None:
        """None: the engine is gone."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(found)
