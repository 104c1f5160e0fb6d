"""A cable between a device and a server, in user space: it can be cut and goes on by itself."""

import socket
import struct
import threading
from contextlib import suppress


class Cable:
    """Forward connections to a port of this machine."""

    def __init__(self, port):
        self._port, self._ends, self.cuts = port, [], 0
        self._lock, self._is_over = threading.Lock(), False
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._porter = threading.Thread(target=self._accept, daemon=True)
        self._porter.start()

    def cut(self):
        """Reset all connections."""
        self.cuts += 1
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            _reset(end)

    def close(self):
        self._is_over = True
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._porter.join()
        self.cut()

    def _accept(self):
        while not self._is_over:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                _reset(near)
                continue
            with self._lock:
                self._ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=pair, daemon=True).start()


def _carry(source, target):
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    _reset(source)
    _reset(target)


def _reset(end):
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()
