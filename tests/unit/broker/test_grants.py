"""Grants of a caller: what is kept is what the ACLs allow now, and not more names than the bound."""

from __future__ import annotations

import pytest

from mansio.broker.services import authorization
from mansio.broker.services.authorization import Authorization, Grants
from mansio.errors import GroupAuthorizationFailed, TransactionalIdAuthorizationFailed
from mansio.state.authorization.acls import WILDCARD, Operation, Permission
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import ALICE, GROUP, PEER, TOPIC, TRANSACTIONAL_ID, acl
from support.present import present

READ, WRITE = Operation.READ, Operation.WRITE


def grants_of(authorizer: Authorizer) -> Grants:
    return present(Authorization(authorizer).grants(ALICE))


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
    assert grants.may_read("t")
    assert grants.may_write("t", b"id")
    grants.check_group("g", "SHARE_FETCH")
    grants.check_transactional_id("x")
    kept = grants.readable, grants.writable, grants.groups, grants.transactional_ids
    assert kept == ({"t"}, {b"id"}, {"g"}, {"x"})
    authorizer.add(acl(TOPIC, "other", READ, Permission.DENY))
    assert grants.revision != grants.rules.revision
    assert not grants.may_read("other")
    assert grants.revision == grants.rules.revision
    assert not any(kept)


def test_a_refusal_is_not_kept() -> None:
    authorizer = Authorizer()
    grants = grants_of(authorizer)
    assert not grants.may_read("t")
    assert not grants.may_write("t")
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
        assert grants.may_read(f"t{number}")
        assert f"t{number}" in grants.readable
        assert len(grants.readable) <= 3
