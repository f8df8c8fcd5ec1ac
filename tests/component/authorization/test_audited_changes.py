"""Each administrative change is audited, however many a request has: by name, or counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mansio.api.kafka.server.authorization_table import OTHER_CHANGES_MAX
from mansio.api.kafka.server.request_router import RequestRouter
from mansio.config.item_limit import ITEMS_MAX
from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping


def audited(api_key: ApiKey, request: Any, fields: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []

    def report_change(_caller: object, resource_type: str, name: str, *, event_count: int = 1) -> None:
        found.append((resource_type, name, event_count))

    service = SimpleNamespace(audit=SimpleNamespace(report_change=report_change))
    context = SimpleNamespace(api_key=api_key, caller=None)
    RequestRouter(cast("Any", service))._report_changes(request, cast("Any", context), fields)
    return found


def test_what_a_request_changes_beyond_the_limit_is_one_line_with_the_number() -> None:
    topics = [{"name": f"t{number}", "error_code": number % 2} for number in range(2_000)]
    found = audited(ApiKey.CREATE_TOPICS, SimpleNamespace(), {"topics": topics})
    assert found[:2] == [("topic", "t0", 1), ("topic", "t2", 1)]
    assert len(found) == OTHER_CHANGES_MAX + 1
    assert found[-1] == ("topic", OTHER_RESOURCES, 1_000 - OTHER_CHANGES_MAX)


def test_each_acl_that_a_request_adds_is_named() -> None:
    creations = [
        SimpleNamespace(
            resource_type=2,
            resource_pattern_type=3,
            resource_name=f"t{number}",
            principal="User:eve",
            host="*",
            operation=3,
            permission_type=3,
        )
        for number in range(ITEMS_MAX)
    ]
    fields = {"results": [{"error_code": 0}] * ITEMS_MAX}
    found = audited(ApiKey.CREATE_ACLS, SimpleNamespace(creations=creations), fields)
    assert len({name for _, name, _ in found}) == ITEMS_MAX
    assert all(count == 1 for _, _, count in found)
