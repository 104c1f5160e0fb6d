"""Device processes of this machine, without the processes."""

import threading
from multiprocessing.connection import Listener

from pliant.bench.local_devices import SocketTransport


def test_a_device_that_is_stopped_while_it_works_sends_no_reply(tmp_path):
    socket = str(tmp_path / "0")

    def receive_and_stop():
        with listener.accept() as connection:
            connection.recv_bytes()

    with Listener(socket, family="AF_UNIX") as listener:
        stopped = threading.Thread(target=receive_and_stop)
        stopped.start()
        transport = SocketTransport([socket])
        transport._request(0, b"train")
        stopped.join()
    assert transport.poll_replies() == []
