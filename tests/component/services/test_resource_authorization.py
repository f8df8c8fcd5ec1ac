"""Offsets, records, settings and quotas: who has no right for the topic, the group or the cluster changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.configs import ConfigAlteration, ConfigQuery, ConfigResource
from mansio.broker.services.quotas import CLIENT_ID, QuotaAlteration
from mansio.broker.services.records import ListedOffset, OffsetQuery, RecordsToDelete
from mansio.config.config_def import Change, ResourceType
from mansio.config.config_def import Operation as ConfigOperation
from mansio.errors import (
    AuthorizationFailed,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
)
from mansio.state.authorization.acls import CLUSTER_NAME, Operation
from mansio.state.authorization.authorizer import Authorizer
from mansio.state.quota import PRODUCER_BYTE_RATE
from mansio.wire.field_values import LATEST_TIMESTAMP
from support.authorization import ADMIN, ALICE, CLUSTER, GROUP, TOPIC, acl

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


def test_offsets_and_deletions_of_records_need_the_topic_each(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        records, authorizer = services.records, Authorizer(["User:admin"])
        records._authorization = Authorization(authorizer)
        authorizer.add(acl(TOPIC, "t", Operation.DESCRIBE))
        queries = [OffsetQuery(name, 0, LATEST_TIMESTAMP) for name in ("u", "t", "absent")]
        found = await records.list_offsets(queries, caller=ALICE)
        assert [type(each) for each in found] == [
            TopicAuthorizationFailed,
            ListedOffset,
            TopicAuthorizationFailed,
        ]
        records.offset_for_leader_epoch("t", None, 0, 0, caller=ALICE)
        with pytest.raises(TopicAuthorizationFailed):
            records.offset_for_leader_epoch("absent", None, 0, 0, caller=ALICE)
        deletions = [RecordsToDelete(name, 0, 0) for name in ("t", "absent")]
        refused = await records.delete_records(deletions, timeout_ms=1000, caller=ALICE)
        assert {type(each) for each in refused} == {TopicAuthorizationFailed}
        authorizer.add(acl(TOPIC, "t", Operation.DELETE))
        deleted = await records.delete_records(deletions, timeout_ms=1000, caller=ALICE)
        assert deleted[0] == 0
        assert isinstance(deleted[1], TopicAuthorizationFailed)

    run(tmp_path, work)


def test_settings_need_the_topic_the_group_or_the_cluster(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        configs, authorizer = services.configs, Authorizer(["User:admin"])
        configs._authorization = Authorization(authorizer)
        own = str(services.settings.node_id)
        resources = [
            ConfigResource(ResourceType.TOPIC, "t"),
            ConfigResource(ResourceType.TOPIC, "absent"),
            ConfigResource(ResourceType.GROUP, "g"),
            ConfigResource(ResourceType.BROKER, own),
        ]
        queries = [ConfigQuery(each) for each in resources]
        expected = [
            TopicAuthorizationFailed,
            TopicAuthorizationFailed,
            GroupAuthorizationFailed,
            ClusterAuthorizationFailed,
        ]
        assert [type(each.error) for each in configs.describe(queries, caller=ALICE)] == expected
        changes = [Change("retention.ms", ConfigOperation.SET, "60000")]
        alterations = [ConfigAlteration(each, changes) for each in resources]
        errors = await configs.alter(alterations, caller=ALICE)
        assert [type(each) for each in errors] == expected
        with pytest.raises(ClusterAuthorizationFailed):
            configs.list_resources(caller=ALICE)

        for kind, name in ((TOPIC, "t"), (GROUP, "g"), (CLUSTER, CLUSTER_NAME)):
            authorizer.add(acl(kind, name, Operation.DESCRIBE_CONFIGS))
        found = list(configs.describe(queries, caller=ALICE))
        assert [type(each.error) for each in found] == [
            type(None),
            TopicAuthorizationFailed,
            type(None),
            type(None),
        ]
        assert configs.list_resources(caller=ALICE) == configs.list_resources(caller=ADMIN)
        errors = await configs.alter(alterations, caller=ALICE)
        assert all(isinstance(each, AuthorizationFailed) for each in errors), "to describe is not to alter"
        authorizer.add(acl(TOPIC, "t", Operation.ALTER_CONFIGS))
        assert await configs.alter(alterations[:1], caller=ALICE) == [None]

    run(tmp_path, work)


def test_quotas_need_the_cluster(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        quotas, authorizer = services.quotas, Authorizer(["User:admin"])
        quotas._authorization = Authorization(authorizer)
        alterations = [QuotaAlteration([(CLIENT_ID, "slow")], [(PRODUCER_BYTE_RATE, 1000.0)])]
        (error,) = await quotas.alter_each(alterations, caller=ALICE)
        assert isinstance(error, ClusterAuthorizationFailed)
        with pytest.raises(ClusterAuthorizationFailed):
            quotas.describe(caller=ALICE)
        assert quotas.describe(caller=ADMIN) == []
        authorizer.add(acl(CLUSTER, CLUSTER_NAME, Operation.ALTER_CONFIGS))  # implies DESCRIBE_CONFIGS
        assert await quotas.alter_each(alterations, caller=ALICE) == [None]
        assert len(quotas.describe(caller=ALICE)) == 1

    run(tmp_path, work)
