"""Table of supported APIs, and the compatibility document generated from it."""

from __future__ import annotations

from pathlib import Path

from kio.schema.index import api_key_map
from tools.compatibility import render

from mansio.wire.api_versions import (
    SUPPORTED_APIS,
    UNSUPPORTED_APIS,
    ApiKey,
    advertised_versions,
    is_flexible,
    is_supported,
)
from mansio.wire.apis import mansio_apis

ROOT = Path(__file__).parents[3]


def test_compatibility_document_matches_the_table() -> None:
    assert (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8") == render()


def test_every_api_has_its_row_and_kafkas_name() -> None:
    assert list(SUPPORTED_APIS) == list(ApiKey) == sorted(ApiKey)
    for key, api in SUPPORTED_APIS.items():
        assert api.key is key
        if not mansio_apis.is_mansio_api(key):
            assert api_key_map[key] == key.name.lower()
        assert api.min_version <= api.max_version
        own_way = (
            ApiKey.PRODUCE,
            ApiKey.FETCH,
            ApiKey.SHARE_FETCH,
            ApiKey.SHARE_ACKNOWLEDGE,
            ApiKey.CHALLENGE_BROKER,
            ApiKey.AUTHENTICATE_BROKER,
            ApiKey.FORWARD_REQUEST,
        )
        assert (api.handler is None) == (key in own_way)


def test_produce_is_advertised_from_0_for_old_librdkafka_but_not_supported() -> None:
    """KAFKA-18659."""
    assert (0, 0, 13) in advertised_versions()
    assert not is_supported(ApiKey.PRODUCE, 2)
    assert is_supported(ApiKey.PRODUCE, 3)
    assert is_supported(ApiKey.INIT_PRODUCER_ID, 5)
    assert not is_supported(ApiKey.INIT_PRODUCER_ID, 6)
    assert (1, 4, 18) in advertised_versions()


def test_everything_is_advertised_but_what_only_brokers_of_mansio_send() -> None:
    hidden = {
        ApiKey.CHALLENGE_BROKER,
        ApiKey.AUTHENTICATE_BROKER,
        ApiKey.RECEIVE_RECORDS,
        ApiKey.RELEASE_LEASES,
        ApiKey.REGISTER_SHARE_GROUP,
        ApiKey.FORWARD_REQUEST,
        ApiKey.CONFIRM_HAND_OVER,
        ApiKey.READ_TRACE,
        ApiKey.COLLECT_GROUP_FACTS,
        ApiKey.DESCRIBE_PARTITION_RATES,
    }
    assert {key for key, _, _ in advertised_versions()} == set(SUPPORTED_APIS) - hidden


def test_unknown_keys_and_versions_are_not_supported() -> None:
    for key, version in ((-1, 0), (4, 0), (32767, 0), (18, 5), (18, -1), (80, 0)):
        assert not is_supported(key, version)
    assert not is_flexible(4, 30_000)
    assert not is_flexible(ApiKey.OFFSET_DELETE, 30_000)


def test_every_unsupported_api_has_a_reason() -> None:
    assert all(UNSUPPORTED_APIS.values())
    page = render()
    assert all(reason in page for reason in UNSUPPORTED_APIS.values())
    assert all(api.newer_unsupported_reason in page and api.note in page for api in SUPPORTED_APIS.values())
