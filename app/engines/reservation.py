"""Places in a model's queue, held while a request is being prepared: rendering and tokenizing take time."""

import asyncio


class QueueReservations:
    """Places of one model that are held by requests which are not submitted yet."""

    def __init__(self) -> None:
        self.places = 0

    def hold(self, places: int) -> "QueueReservation":
        """Until it is released or the running task ends, whichever is first."""
        return QueueReservation(self, places)


class QueueReservation:
    """`places` of one request. `release` gives them back, once."""

    __slots__ = ("_of", "_places")

    def __init__(self, of: QueueReservations, places: int) -> None:
        self._of = of
        self._places = places
        of.places += places
        task = asyncio.current_task()
        assert task is not None, "requests are prepared on the event loop"
        task.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        self._of.places -= self._places
        self._places = 0
