"""A member of etcd that lost its directory."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConfigError
from mansio.node.etcd_member.member import EtcdMember
from support.machine import scaled
from system.cluster.test_etcd_member import WAIT_S, address, ask, member

if TYPE_CHECKING:
    from pathlib import Path


def test_a_member_that_lost_its_directory_comes_back_as_documented(tmp_path: Path) -> None:
    everybody = [address() for _ in range(3)]

    async def scenario() -> None:
        three = [member(tmp_path / str(index), one, everybody) for index, one in enumerate(everybody)]
        try:
            await asyncio.gather(*(one.start(scaled(WAIT_S)) for one in three))
            await three[2].stop()
            shutil.rmtree(tmp_path / "2")
            with pytest.raises(ConfigError, match="has already been bootstrapped"):
                await member(tmp_path / "2", everybody[2], everybody).start(scaled(WAIT_S))
            url = three[0].client_url
            listed = (await asyncio.to_thread(ask, url, "cluster/member/list"))["members"]
            lost = next(one["ID"] for one in listed if one["name"] == everybody[2].name)
            await asyncio.to_thread(ask, url, "cluster/member/remove", ID=lost)
            await asyncio.to_thread(ask, url, "cluster/member/add", peerURLs=[everybody[2].peer_url()])
            plan = replace(three[2].plan, initial_cluster_state="existing", directory=str(tmp_path / "new"))
            three[2] = EtcdMember(plan, three[0].program)
            await three[2].start(scaled(WAIT_S))
        finally:
            await asyncio.gather(*(one.stop(1) for one in three))

    asyncio.run(scenario())
