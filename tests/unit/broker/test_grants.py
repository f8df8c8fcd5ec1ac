"""Grants of a caller: what is kept is what the ACLs allow now, and not more names than the bound."""

from __future__ import annotations

import pytest

from mansio.broker.services import authorization
from mansio.broker.services.authorization import Authorization, Grants
from mansio.errors import (
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.state.authorization.acls import WILDCARD, Operation, Permission
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import ALICE, GROUP, PEER, TOPIC, TRANSACTIONAL_ID, acl
from support.present import present

READ, WRITE = Operation.READ, Operation.WRITE
TOPIC_ID = bytes(15) + b"\1"
NAMES = {TOPIC_ID: "t"}


def grants_of(authorizer: Authorizer) -> Grants:
    return present(Authorization(authorizer).grants(ALICE))


def may_read(grants: Grants, name: str) -> bool:
    return grants.topic_error(READ, name, None, NAMES.get, "FETCH") is None


def may_write(grants: Grants, name: str, topic_id: bytes | None = None) -> bool:
    named = name if topic_id is None else None
    return grants.topic_error(WRITE, named, topic_id, NAMES.get, "PRODUCE") is None


def test_who_may_do_everything_has_no_grants() -> None:
    assert Authorization(None).grants(ALICE) is None
    assert Authorization(Authorizer()).grants(PEER) is None


def test_a_change_of_the_acls_forgets_everything() -> None:
    authorizer = Authorizer()
    for each in (
        acl(TOPIC, "t", READ),
        acl(TOPIC, "t", WRITE),
        acl(GROUP, "g", READ),
        acl(TRANSACTIONAL_ID, "x", WRITE),
    ):
        authorizer.add(each)
    grants = grants_of(authorizer)
    assert may_read(grants, "t")
    assert may_write(grants, "t", TOPIC_ID)
    grants.check_group("g", "SHARE_FETCH")
    grants.check_transactional_id("x")
    kept = grants.readable, grants.writable, grants.groups, grants.transactional_ids
    assert kept == ({"t"}, {TOPIC_ID}, {"g"}, {"x"})
    authorizer.add(acl(TOPIC, "other", READ, Permission.DENY))
    assert grants.revision != grants.rules.revision
    assert not may_read(grants, "other")
    assert grants.revision == grants.rules.revision
    assert not any(kept)


def test_a_refusal_is_not_kept() -> None:
    authorizer = Authorizer()
    grants = grants_of(authorizer)
    assert not may_read(grants, "t")
    assert not may_write(grants, "t")
    with pytest.raises(GroupAuthorizationFailed):
        grants.check_group("g", "SHARE_FETCH")
    with pytest.raises(TransactionalIdAuthorizationFailed):
        grants.check_transactional_id("x")
    assert not any((grants.readable, grants.writable, grants.groups, grants.transactional_ids))


def test_the_number_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization, "GRANTS_MAX", 3)
    authorizer = Authorizer()
    authorizer.add(acl(TOPIC, WILDCARD, READ))
    grants = grants_of(authorizer)
    for number in range(10):
        assert may_read(grants, f"t{number}")
        assert f"t{number}" in grants.readable
        assert len(grants.readable) <= 3


def test_the_error_of_a_topic_that_is_given_by_id_has_no_name_and_the_audit_has_it() -> None:
    audited = []
    asked = Authorization(Authorizer(), lambda _caller, _operation, _type, name, **_: audited.append(name))
    grants = present(asked.grants(ALICE))
    error = present(grants.topic_error(READ, None, TOPIC_ID, {TOPIC_ID: "secret"}.get, "FETCH"))
    with pytest.raises(TopicAuthorizationFailed) as refused:
        asked.check_topic_id(ALICE, READ, TOPIC_ID, {TOPIC_ID: "secret"}.get)
    for each in (error.message, refused.value.message):
        assert "secret" not in each
        assert "00000000-0000-0000-0000-000000000001" in each
    assert audited == ["secret", "secret"]
    assert grants.topic_error(READ, None, bytes(16), NAMES.get, "FETCH") is None, "another error tells it"
