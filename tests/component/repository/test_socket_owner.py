"""Tests of the lookup that finds which process owns a connection; tests that disconnect brokers from each other depend
on it."""

from __future__ import annotations

import os
import socket

from support import socket_owner
from support.waiting import wait_until


def test_the_socket_of_a_connection_is_found_by_its_ports_and_so_is_who_has_it_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        ends = one.getsockname()[1], listener.getsockname()[1]
        inode = os.fstat(one.fileno()).st_ino
        assert socket_owner.socket_of(*ends) == inode
        wait_until(
            lambda: socket_owner._listed(*ends) == inode
        )  # the list may lack it while others come and go
        assert socket_owner.holds(os.getpid(), inode)
        assert not socket_owner.holds(os.getppid(), inode)
    assert socket_owner.socket_of(*ends) is None
