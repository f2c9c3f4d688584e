"""Collectives between CPU processes: tensors in shared memory, and a byte on a socket as a signal.

Memory and sockets are inherited from rank 0: no port, no name, nothing that another process of the machine
could open. The all-reduce of a decoding step is two short copies and a wake-up; gloo, over TCP on the
loopback interface, takes several times as long.

Each rank has two slots. In exchange n it writes slot n % 2, signals its peers, waits for their signals, and
reads their slots. No rank overwrites a slot that another still reads: a rank signals exchange n + 1 only
after it has read exchange n, and the slot of exchange n is reused in n + 2, after all ranks signaled n + 1.
"""

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_io import bytes_of
from ..errors import RankLost
from ..model_config.parallel_layout import ParallelLayout
from .communicator import AsyncWork, CompletedWork, rows_of_rank
from .torch_communicator import add_in_order

SLOT = 1 << 20
"""Bytes of a slot. Larger tensors are exchanged in pieces."""
ADD_UP_TO = 128 << 10
"""Bytes of expert results up to which they are added up, with the zeros of other ranks."""
_PLACES = 64
# Entries of the cache of slot views, by tensor size and dtype.


@dataclass(frozen=True, slots=True)
class PeerSockets:
    """File descriptors of one rank, which a child process can inherit."""

    memory: int
    peers: dict[int, int]
    """Sockets to other ranks, by rank."""

    @property
    def all(self) -> tuple[int, ...]:
        return (self.memory, *self.peers.values())

    def close(self) -> None:
        for fd in self.all:
            os.close(fd)


def make_ends(layout: ParallelLayout) -> list[PeerSockets]:
    """Create the descriptors of all ranks, each with its own one for the memory.

    The caller closes those that a child has inherited.
    """
    ranks = [ParallelLayout(layout.tp, layout.pp, rank) for rank in range(layout.ranks)]
    memory = os.memfd_create("llmbox-ranks")
    os.ftruncate(memory, layout.ranks * 2 * SLOT)
    peers: list[dict[int, int]] = [{} for _ in ranks]
    for one in ranks:
        for other in ranks[one.rank + 1 :]:
            hands_back = one.is_first and other.rank == one.other_end
            if one.stage == other.stage or other.rank == one.rank + layout.tp or hands_back:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                peers[one.rank][other.rank], peers[other.rank][one.rank] = ours.detach(), theirs.detach()
    ends = [PeerSockets(os.dup(memory), each) for each in peers]
    os.close(memory)
    return ends


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """Receive that happens in `wait`, which is called once, in order."""

    wait: Callable[[], None]


class ShmCommunicator:
    """`Communicator` over shared memory and sockets."""

    def __init__(self, layout: ParallelLayout, ends: PeerSockets) -> None:
        """Takes ownership of `ends`."""
        self._layout = layout
        self._sockets = {rank: socket.socket(fileno=fd) for rank, fd in ends.peers.items()}
        self._stage = [self._sockets[rank] for rank in layout.stage_ranks if rank != layout.rank]
        self._memory = mmap.mmap(ends.memory, layout.ranks * 2 * SLOT)
        os.close(ends.memory)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8).view(layout.ranks, 2, SLOT)
        self._places = lru_cache(_PLACES)(partial(find_places, slots, layout.stage_ranks))
        self._turn = 0

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> None:
        flat, into = x.view(-1), (x if out is None else out).view(-1)
        for piece, place in zip(_pieces(flat), _pieces(into, flat), strict=True):
            add_in_order(self._exchange(piece), place)

    def all_gather(self, x: Tensor) -> Tensor:
        pieces = [torch.stack(self._exchange(piece)) for piece in _pieces(x.reshape(-1))]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return whole.view(self._layout.tp, *x.shape)

    def all_to_all_rows(self, x: Tensor) -> Tensor:
        layout, width = self._layout, x.shape[1]
        at_once = max(1, SLOT // (width * x.element_size()))
        columns = min(width, SLOT // x.element_size())
        mine = rows_of_rank(len(x), layout.tp, layout.tp_rank)
        out = x.new_empty(mine.stop - mine.start, layout.tp, width)
        for rank in range(layout.tp):
            rows = rows_of_rank(len(x), layout.tp, rank)
            for start, first in product(range(rows.start, rows.stop, at_once), range(0, width, columns)):
                part = x[start : min(rows.stop, start + at_once), first : first + columns]
                received = self._exchange(part.reshape(-1))
                if rank != layout.tp_rank:
                    continue  # nothing to read: that rank does
                into = out[start - rows.start :, :, first:]
                for peer, piece in enumerate(received):
                    into[: len(part), peer, : part.shape[1]].copy_(piece.view(part.shape))
        return out.flatten(1)

    def exchange_rows(self, rows_TKE: Tensor, owners_TK: Tensor) -> None:
        """Send each row once. Few rows are added up: that is one exchange, and nothing to sort."""
        if rows_TKE.nbytes <= ADD_UP_TO:
            self.all_reduce(rows_TKE)
            return
        layout, owners = self._layout, owners_TK.flatten()
        rows_SE = rows_TKE.view(len(owners), -1)
        of_rank = [torch.nonzero(owners == rank).flatten() for rank in range(layout.tp)]
        most, width = max(map(len, of_rank)), rows_SE.shape[1]
        at_once = max(1, SLOT // (width * rows_SE.element_size()))
        columns = min(width, SLOT // rows_SE.element_size())
        for start, first in product(range(0, most, at_once), range(0, width, columns)):
            part = rows_SE[:, first : first + columns]
            pieces = [rows[start : start + at_once] for rows in of_rank]
            places = self._slots(at_once * part.shape[1] * part.element_size(), part.dtype)
            slots = [place[: len(piece) * part.shape[1]] for place, piece in zip(places, pieces, strict=True)]
            views = [slot.view(-1, part.shape[1]) for slot in slots]
            torch.index_select(part, 0, pieces[layout.tp_rank], out=views[layout.tp_rank])
            self._signal()
            for rank, piece in enumerate(pieces):
                if rank != layout.tp_rank and len(piece):
                    part.index_copy_(0, piece, views[rank])

    def send(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._send(tensor, self._layout.rank + self._layout.tp)

    def receive(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._receive(tensor, self._layout.rank - self._layout.tp)

    def transfer(self, x: Tensor, source: int, destination: int) -> None:
        ranks = self._layout.stage_ranks
        if source == self._layout.tp_rank:
            self._send(x, ranks[destination])
        else:
            self._receive(x, ranks[source])

    def can_fuse(self, _rows: int, _width: int, _dtype: torch.dtype) -> bool:
        return False

    def all_reduce_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, row_format: Any
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def all_agree(self, works: bool) -> bool:
        """Pass the votes from stage to stage, and the result back: without steps that overlap, nothing else
        goes that way.
        """
        layout, vote = self._layout, torch.tensor([works], dtype=torch.int32)
        if not layout.is_first:
            self.receive(earlier := torch.empty_like(vote))
            vote *= earlier
        if layout.tp > 1:
            vote = self.all_gather(vote).amin(0)
        if not layout.is_last:
            self.send(vote)
            self._receive(vote, layout.rank + layout.tp)
        if not layout.is_first:
            self._send(vote, layout.rank - layout.tp)
        return bool(vote)

    def transfer_to_first_stage(self, x: Tensor) -> AsyncWork:
        """Send into the socket, whose buffer holds the ids of more steps than are ever in flight; the first
        stage reads them in `wait`.
        """
        if self._layout.is_last:
            self._send(x, self._layout.other_end)
            return CompletedWork()
        return PendingReceive(partial(self._receive, x, self._layout.other_end))

    def _send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.contiguous()  # kept alive while its bytes are sent
        try:
            self._sockets[rank].sendall(bytes_of(tensor))
        except OSError as error:
            raise RankLost("another stage is gone") from error

    def _receive(self, tensor: Tensor, rank: int) -> None:
        assert tensor.is_contiguous()
        rest = bytes_of(tensor)
        while rest:
            try:
                count = self._sockets[rank].recv_into(rest)
            except OSError as error:
                raise RankLost("another stage is gone") from error
            if not count:
                raise RankLost("another stage is gone")
            rest = rest[count:]

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Exchange one piece; return all ranks' pieces in the order of ranks: views valid until the next
        call.
        """
        places = self._slots(piece.nbytes, piece.dtype)
        places[self._layout.tp_rank].copy_(piece)
        self._signal()
        return places

    def _slots(self, nbytes: int, dtype: torch.dtype) -> list[Tensor]:
        """Begin an exchange: return what all ranks' slots hold after `_signal`, in the order of ranks."""
        self._turn = 1 - self._turn
        return self._places(self._turn, nbytes, dtype)

    def _signal(self) -> None:
        """Tell that this rank's slot is written, and wait for those of the others. Raises RankLost."""
        try:
            for peer in self._stage:
                peer.send(b"\0")
            signals = [peer.recv(1) for peer in self._stage]
        except OSError as error:
            raise RankLost("another rank is gone") from error
        if not all(signals):
            raise RankLost("another rank is gone")


def find_places(
    slots: Tensor, ranks: Sequence[int], turn: int, nbytes: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the views of a tensor of `nbytes` in the slots of these ranks."""
    here = slots[:, turn, :nbytes].view(dtype)
    return [here[rank] for rank in ranks]


def _pieces(flat: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split into pieces of a slot's size, counted in elements of `like`."""
    size = SLOT // (flat if like is None else like).element_size()
    return (flat,) if len(flat) <= size else torch.split(flat, size)
