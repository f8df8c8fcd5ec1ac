"""Clients that disappear in the middle of something, many more of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component import test_clumsy_clients
from component.test_clumsy_clients import check_lives

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from mansio.node.embedded import EmbeddedBroker
    from support.raw_peer import RawPeer

    Moment = Callable[[RawPeer, Random], None]

broker = test_clumsy_clients.broker


@pytest.mark.parametrize("seed", range(100, 106))
def test_many_more_clients_disappear_in_the_middle_of_anything(broker: EmbeddedBroker, seed: int) -> None:
    check_lives(broker, seed, 2000)
