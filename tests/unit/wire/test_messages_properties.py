"""Compiled readers and writers of every schema compared with kio, in every supported version."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.index import api_key_map, schema_name_map

from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, is_flexible
from mansio.wire.apis import mansio_apis
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.codec.schema_compiler import MergedSchema, Struct, schema_fields
from support.tiers import examples, tier
from unit.wire.kio_oracle import every_version, kio_bytes, kio_reads, random_message, to_kio

KAFKAS = [api for api in SUPPORTED_APIS.values() if not mansio_apis.is_mansio_api(api.key)]
ALL = list(every_version(without=(ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.SHARE_FETCH)))


def is_edge(api_key: int, version: int) -> bool:
    """Whether a version is the oldest, the newest, or the first flexible one of its API."""
    api = SUPPORTED_APIS[ApiKey(api_key)]
    is_first_flexible = is_flexible(api_key, version) and not is_flexible(api_key, version - 1)
    return version in (api.min_version, api.max_version) or is_first_flexible


CASES: dict[str, list[tuple[int, int, str]]] = {}
"""API key, version and direction of each schema, by the name of the API; versions between the edges in `full` only."""
for key, version, direction in ALL:
    if tier() != "test" or is_edge(key, version):
        CASES.setdefault(api_key_map[key], []).append((key, version, direction))


def plain_equal(struct: object, plain: object) -> bool:
    """Whether a `Struct` holds at least the values of a nested dict, and exactly those in arrays and primitives."""
    if isinstance(plain, dict):
        return isinstance(struct, Struct) and all(
            plain_equal(getattr(struct, name), value) for name, value in plain.items()
        )
    if isinstance(plain, list):
        return isinstance(struct, list) and len(struct) == len(plain) and all(map(plain_equal, struct, plain))
    return struct == plain and type(struct) is type(plain)


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(2, 6), deadline=None)
def test_messages_are_decoded_and_encoded_as_by_kio(name: str, seed: int) -> None:
    for api_key, version, direction in CASES[name]:
        case = f"{name} v{version} {direction}"
        entity = messages._schema(api_key, version, direction)
        plain = random_message(Random(seed), entity)
        expected = kio_bytes(entity, plain)

        out = bytearray()
        messages._writer(api_key, version, direction)(out, plain)
        assert bytes(out) == expected, case
        assert kio_reads(entity, bytes(out)) == to_kio(entity, plain), case

        struct = messages._decode(api_key, version, direction, memoryview(bytearray(expected)))
        assert plain_equal(struct, plain), case
        again = bytearray()
        messages._writer(api_key, version, direction)(again, struct)
        assert bytes(again) == expected, f"{case}: a Struct that was read writes the same bytes"


def test_shape_has_every_field_of_every_version() -> None:
    def check(entity: object, shape: MergedSchema, path: str) -> None:
        for field in schema_fields(entity):
            assert field.name in shape.defaults, f"{path}.{field.name}"
            if field.entity is not None:
                check(field.entity, shape.children[field.name], f"{path}.{field.name}")

    for api_key, version, direction in ALL:
        entity = messages._schema(api_key, version, direction)
        check(
            entity,
            messages.merged_schema(api_key, direction),
            f"{api_key_map[api_key]} v{version} {direction}",
        )


@pytest.mark.parametrize("name", CASES)
def test_reader_sets_all_fields_in_every_version(name: str) -> None:
    for api_key, version, direction in CASES[name]:
        entity = messages._schema(api_key, version, direction)
        data = kio_bytes(entity, random_message(Random(1), entity))
        struct = messages._decode(api_key, version, direction, data)
        assert set(vars(struct)) == set(messages.merged_schema(api_key, direction).defaults), (
            version,
            direction,
        )


def test_flexible_versions_match_kio() -> None:
    for api in KAFKAS:
        for version in schema_name_map[api_key_map[api.key]]:
            for direction in (REQUEST, RESPONSE):
                flexible = messages._schema(api.key, version, direction).__flexible__
                assert flexible == is_flexible(api.key, version), (api.key.name, version, direction)


def test_supported_versions_exist_and_newer_ones_have_a_reason() -> None:
    for api in KAFKAS:
        known = schema_name_map[api_key_map[api.key]]
        assert set(range(api.min_version, api.max_version + 1)) <= set(known), api.key.name
        assert bool(api.newer_unsupported_reason) == (max(known) > api.max_version), api.key.name
        assert not api.newer_unsupported_reason or re.match(
            rf"{api.max_version + 1}\b", api.newer_unsupported_reason
        ), api.key.name
