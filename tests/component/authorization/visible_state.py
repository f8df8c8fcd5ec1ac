"""What a refused request must not change: the metadata, and the records of topics that are not internal. Internal
topics are created and written to in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.services.broker_services import BrokerServices


def visible_state(service: BrokerServices) -> Any:
    """Return the state; two of them are equal if nothing has changed. To be called on the broker's loop."""
    state = service.topics.state
    topics = [each for each in state.topics.values() if not each.internal]
    return (
        {each.name: (each.topic_id, len(each.partitions), dict(each.configs)) for each in topics},
        {
            (each.name, index): partition.log.end_offset
            for each in topics
            for index in range(len(each.partitions))
            if (partition := service.partitions.get(each.name, index)) is not None
        },
        dict(state.quotas),
        dict(state.group_configs),
        dict(state.broker_configs),
        {user: dict(credentials) for user, credentials in state.users.items()},
        set(state.acls),
    )


def names_of_state(service: BrokerServices) -> set[tuple[str, str]]:
    """Return what coordinators know by name: groups, transactional ids and queries. To be called on the broker's
    loop."""
    store = service.transactions._coordinator.store
    known: dict[str, Iterable[str]] = {
        "group": service.transactions._groups.store.entries,
        "transactional id": store.entries,
        "query": store.decisions.entries,
    }
    return {(kind, name) for kind, names in known.items() for name in names}
