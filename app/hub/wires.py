"""Connections that another thread can end: a read that waits for a silent hub does not wait any longer."""

import contextlib
import http.client
import socket
import threading
import urllib.request
import weakref


class Wires:
    """The sockets of one client. Safe to be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_cut = False

    def handlers(self) -> tuple[urllib.request.BaseHandler, ...]:
        """For an opener whose connections are to be among them."""
        return _Http(self), _Https(self)

    def add(self, wire: socket.socket) -> None:
        with self._lock:
            self._open.add(wire)
            if self._is_cut:
                _shut(wire)

    def cut(self) -> None:
        """Reads under way and later ones end at once, as if the other side had closed."""
        with self._lock:
            self._is_cut = True
            for wire in self._open:
                _shut(wire)


def _shut(wire: socket.socket) -> None:
    """The plain socket, also under TLS, whose state belongs to the reading thread."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(wire, socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, wires: Wires) -> None:
        super().__init__()
        self._wires = wires

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        wires = self._wires

        class Wired(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                wires.add(self.sock)

        return self.do_open(Wired, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, wires: Wires) -> None:
        super().__init__()
        self._wires = wires

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        wires = self._wires

        class Wired(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                wires.add(self.sock)

        return self.do_open(Wired, req)
