"""The assignors this broker offers, by name: the two of ours, and others that are installed as entry points.

Another package offers one as an entry point of the group `mansio.assignors` that names a class (`state.assignors` has
what it must do); `group_consumer_assignors` says which are offered, the first of them to members that ask for none.

Always true: what is offered was found and made when the broker started; the names of ours cannot be taken by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.state.assignors.range import RangeAssignor
from mansio.state.assignors.uniform import UniformAssignor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.state.assignors import Assignor

ENTRY_POINTS: Final = "mansio.assignors"

_BUILT_IN: Final[dict[str, type[Any]]] = {"uniform": UniformAssignor, "range": RangeAssignor}


def load_assignors(names: Iterable[str]) -> Mapping[str, Assignor]:
    """The assignors of these names, in this order. Raises `ConfigError`, one line that says which and why."""
    wanted = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not wanted:
        raise ConfigError("group_consumer_assignors: at least one assignor has to be offered")
    return {name: _load(name) for name in wanted}


def _load(name: str) -> Assignor:
    assignor: Assignor
    if name in _BUILT_IN:
        assignor = _BUILT_IN[name]()
        return assignor
    from importlib.metadata import entry_points  # it costs a start that most brokers need not pay

    found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is None:
        known = ", ".join(sorted({*_BUILT_IN, *(each.name for each in entry_points(group=ENTRY_POINTS))}))
        raise ConfigError(f"group_consumer_assignors: there is no assignor {name!r}, but {known}")
    try:
        assignor = found.load()()
    except Exception as error:
        raise ConfigError(
            f"group_consumer_assignors: {name!r} cannot be loaded from {found.value}: {error}"
        ) from error
    if getattr(assignor, "name", None) != name or not callable(getattr(assignor, "assign", None)):
        raise ConfigError(f"group_consumer_assignors: {found.value} is not an assignor named {name!r}")
    return assignor
