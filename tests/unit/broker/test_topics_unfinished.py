"""Steps of making and deleting topics that happen when they were given up long ago."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from mansio.errors import InvalidTopic
from mansio.metadata.metadata_store import Put, encode
from mansio.metadata.model import TOPIC_CREATING, TOPIC_DELETING, TopicCreator, topic_document
from support.brokers import TTL_S, Cluster
from support.virtual_time import run_virtually


@pytest.mark.parametrize("state", [TOPIC_CREATING, TOPIC_DELETING])
def test_a_step_that_comes_late_leaves_no_topic_unfinished(state: str) -> None:
    """The session it names lives, so that the controller leaves it alone: the broker itself has to see it."""

    async def main() -> None:
        cluster = Cluster()
        try:
            await cluster.start(1, 2, 3)
            for member in cluster.alive():
                await member.registered()
            member = cluster.brokers[1]
            await member.create("t")
            created_by = TopicCreator(1, member.membership.epoch)
            topic = dataclasses.replace(member.state.topics["t"], state=state, created_by=created_by)
            put = Put(member.state.keys.topic("t"), encode(topic_document(topic), "late"))
            cluster.store.transact([], [put])
            await cluster.until(lambda: "t" in member.state.unfinished_topics)
            await cluster.until(lambda: not member.state.unfinished_topics, within_s=TTL_S)
            assert "t" not in member.state.topics
            await member.create("t")
        finally:
            await cluster.stop()

    run_virtually(main())


@pytest.mark.parametrize("back", [False, True])
def test_a_topic_that_the_controller_deletes_while_it_is_made_leaves_nothing_open(*, back: bool) -> None:
    """Its maker's session ends while the disk opens the partitions; `back`: it has another one when they are open."""

    async def main() -> None:
        cluster = Cluster()
        try:
            await cluster.start(1, 2, 3)
            for member in cluster.alive():
                await member.registered()
            member, other = cluster.brokers[1], cluster.brokers[2]
            gate = member.host.gate = asyncio.Event()
            making = asyncio.create_task(member.create("t"))
            await cluster.until(lambda: "t" in other.state.unfinished_topics)
            member.keeps_alive = False
            await cluster.until(lambda: "t" not in other.state.unfinished_topics)
            member.keeps_alive = back
            if back:
                await member.registered()
            gate.set()
            await asyncio.wait([making])
            assert making.exception() is not None, "whoever asked is told"
            await cluster.until(lambda: not member.host.directories, within_s=5)
        finally:
            await cluster.stop()

    run_virtually(main())


def test_of_colliding_topics_that_two_brokers_create_at_the_same_time_one_stays() -> None:
    """Neither sees the other's topic before it writes its own."""

    async def main() -> None:
        cluster = Cluster()
        try:
            await cluster.start(1, 2, 3)
            for member in cluster.alive():
                await member.registered()
            works = [cluster.brokers[1].create("a.b"), cluster.brokers[2].create("a_b")]
            found = await asyncio.gather(*works, return_exceptions=True)
            assert [type(each) for each in found if isinstance(each, BaseException)] == [InvalidTopic]
            for member in cluster.alive():
                await cluster.until(lambda each=member: not each.state.unfinished_topics, within_s=TTL_S)
                assert len({"a.b", "a_b"} & set(member.state.topics)) == 1
        finally:
            await cluster.stop()

    run_virtually(main())
