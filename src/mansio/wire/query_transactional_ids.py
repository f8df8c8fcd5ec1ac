"""Transactional ids of the tasks of a query: `mansio-spark:QUERY:TASK:SLOT`.

A query id has no colon, so each transactional id belongs to one query, whose broker decides about it.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "mansio-spark"
PARTS: Final = 4


def transactional_id_prefix(query_id: str) -> str:
    """Return the beginning of all transactional ids of a query."""
    return f"{PREFIX}:{query_id}:"


def task_transactional_id(query_id: str, task: int, slot: int) -> str:
    """Return the transactional id of a slot of a task."""
    return f"{transactional_id_prefix(query_id)}{task}:{slot}"


def query_id_of(transactional_id: str) -> str | None:
    """Return the query to which a transactional id belongs, None for that of another producer."""
    parts = transactional_id.split(":")
    if len(parts) != PARTS or parts[0] != PREFIX or not (parts[2].isdecimal() and parts[3].isdecimal()):
        return None
    return parts[1] or None
