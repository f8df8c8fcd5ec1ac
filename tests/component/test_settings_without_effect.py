"""Settings that brokers accept and do not use: the broker starts, its log names the setting and the reason once, and
what the setting was for is not offered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.wire.api_versions import ApiKey
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

NAME = "transaction_two_phase_commit_enable"


def committed(client: mansio.blocking.Client) -> list[bytes | None]:
    with client.consume("orders", from_="earliest", to_end=True) as consumer:
        return [each.value for each in consumer]


@pytest.mark.row("P4", "O1")
@pytest.mark.parametrize("is_set", [True, False])
def test_two_phase_commit_is_not_offered_and_its_setting_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_set: bool
) -> None:
    settings = {NAME: True} if is_set else {}
    with mansio.Broker(tmp_path / "data", auto_create_topics_enable=True, **settings) as broker:
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
            found = peer.call(
                ApiKey.API_VERSIONS, 3, {"client_software_name": "x", "client_software_version": "1"}
            )
        (offered,) = [one for one in found.api_keys if one.api_key == ApiKey.INIT_PRODUCER_ID]
        assert (offered.min_version, offered.max_version) == (0, 5)
        with mansio.blocking.connect(broker.address) as client:
            with client.transaction("orders-1") as transaction:
                transaction.publish("orders", b"a")
            wait_until(lambda: committed(client) == [b"a"], 30)
    warnings = [one for one in caplog.records if one.getMessage() == "setting_without_effect"]
    assert len(warnings) == is_set
    for one in warnings:
        assert one.levelname == "WARNING"
        assert NAME in str(vars(one))
        assert "refused from 0.3" in str(vars(one))
