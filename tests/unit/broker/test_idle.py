"""Idle connections: a connection on which responses wait is idle unless the peer reads some of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mansio.api.kafka.connections.connection import Connection
from mansio.wire.framing import new_scratch_buffer
from support.listeners import served_listener

IDLE_S = 5.0


def connection() -> Any:
    """One that sent something at the beginning of time, and waits for nothing."""
    limits = SimpleNamespace(socket_request_max_bytes=100)
    server = SimpleNamespace(limits=limits, receive_scratch=new_scratch_buffer(), begin=None)
    made = Connection(cast("Any", server), served_listener())
    made._socket_writer = cast("Any", SimpleNamespace(waiting_bytes=0))
    return made


def is_idle(one: Connection, now: float) -> bool:
    return one.is_idle(now, now - IDLE_S)


def test_a_silent_client_is_idle_unless_a_request_is_being_worked_on() -> None:
    one = connection()
    assert [is_idle(one, 4.0), is_idle(one, 6.0)] == [False, True]
    one.queue_response(cast("Any", SimpleNamespace(pieces=None)))
    assert not is_idle(one, 100.0)


def test_who_takes_nothing_of_its_answers_is_idle_whatever_it_has_asked_for() -> None:
    one = connection()
    one.queue_response(cast("Any", SimpleNamespace(pieces=None)))
    one._socket_writer.waiting_bytes = 1000
    assert [is_idle(one, 100.0), is_idle(one, 104.0)] == [False, False]
    one._socket_writer.waiting_bytes = 999
    assert [is_idle(one, 105.0), is_idle(one, 109.0), is_idle(one, 111.0)] == [False, False, True]
    one.last_active = 110.0
    assert not is_idle(one, 112.0), "who still asks takes answers: it is chance that as much waits as before"
