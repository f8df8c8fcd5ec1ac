"""Arguments that the client refuses with `ValueError`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mansio.api.asgi.problems import InvalidField

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def checked(name: str = "") -> Iterator[None]:
    """Raise `InvalidField` where a call of the client raises `ValueError` for an argument."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidField(name, str(error)) from error
