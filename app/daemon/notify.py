"""Words to systemd (sd_notify): a datagram to the socket that NOTIFY_SOCKET names."""

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Does nothing where no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        sender.send(state.encode())
