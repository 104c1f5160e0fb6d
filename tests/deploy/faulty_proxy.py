"""A TCP proxy between a device and a server that counts bytes and can reset connections."""

import socket
import struct
import threading
from contextlib import suppress


class FaultyProxy:
    """Forward connections to a port of this machine."""

    def __init__(self, port):
        self._port, self._sockets, self.cuts = port, [], 0
        self.forwarded_bytes = 0  # in both directions
        self._lock, self._is_closed = threading.Lock(), False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self):
        """Reset all connections."""
        self.cuts += 1
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for connection in sockets:
            _reset(connection)

    def close(self):
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.cut()

    def _accept(self):
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                _reset(client)
                continue
            with self._lock:
                self._sockets += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    self.forwarded_bytes += len(data)
                target.sendall(data)
        _reset(source)
        _reset(target)


def _reset(connection):
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
