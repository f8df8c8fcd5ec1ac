"""Compiled readers and writers of every schema compared with kio, in every supported version."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.index import api_key_map, schema_name_map

from mansio.wire.api_versions import SUPPORTED_APIS, Api, ApiKey, is_flexible
from mansio.wire.apis import mansio_apis
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.codec.schema_compiler import MergedSchema, Struct, schema_fields
from support.tiers import examples
from unit.wire.kio_oracle import every_version, kio_bytes, kio_reads, random_message, to_kio

KAFKAS = [api for api in SUPPORTED_APIS.values() if not mansio_apis.is_mansio_api(api.key)]
ALL = list(every_version(without=(ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.SHARE_FETCH)))


def is_edge(api_key: int, version: int) -> bool:
    """Whether a version is the oldest, the newest, or the first flexible one of its API."""
    api = SUPPORTED_APIS[ApiKey(api_key)]
    is_first_flexible = is_flexible(api_key, version) and not is_flexible(api_key, version - 1)
    return version in (api.min_version, api.max_version) or is_first_flexible


CASES = [
    pytest.param(
        key,
        version,
        direction,
        id=f"{api_key_map[key]}-v{version}-{direction}",
        marks=[] if is_edge(key, version) else [pytest.mark.full],
    )
    for key, version, direction in ALL
]
"""Versions between the edges run in `full` only."""


def plain_equal(struct: object, plain: object) -> bool:
    """Whether a `Struct` holds at least the values of a nested dict, and exactly those in arrays and primitives."""
    if isinstance(plain, dict):
        return isinstance(struct, Struct) and all(
            plain_equal(getattr(struct, name), value) for name, value in plain.items()
        )
    if isinstance(plain, list):
        return isinstance(struct, list) and len(struct) == len(plain) and all(map(plain_equal, struct, plain))
    return struct == plain and type(struct) is type(plain)


@pytest.mark.parametrize(("api_key", "version", "direction"), CASES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(2, 6), deadline=None)
def test_messages_are_decoded_and_encoded_as_by_kio(
    api_key: int, version: int, direction: str, seed: int
) -> None:
    entity = messages._schema(api_key, version, direction)
    plain = random_message(Random(seed), entity)
    expected = kio_bytes(entity, plain)

    out = bytearray()
    messages._writer(api_key, version, direction)(out, plain)
    assert bytes(out) == expected
    assert kio_reads(entity, bytes(out)) == to_kio(entity, plain)

    struct = messages._decode(api_key, version, direction, memoryview(bytearray(expected)))
    assert plain_equal(struct, plain)
    again = bytearray()
    messages._writer(api_key, version, direction)(again, struct)
    assert bytes(again) == expected, "a Struct that was read writes the same bytes"


@pytest.mark.parametrize(("api_key", "version", "direction"), CASES)
def test_shape_has_every_field_of_every_version(api_key: int, version: int, direction: str) -> None:
    def check(entity: object, shape: MergedSchema, path: str) -> None:
        for field in schema_fields(entity):
            assert field.name in shape.defaults, f"{path}.{field.name}"
            if field.entity is not None:
                check(field.entity, shape.children[field.name], f"{path}.{field.name}")

    check(
        messages._schema(api_key, version, direction), messages.merged_schema(api_key, direction), direction
    )


@pytest.mark.parametrize(("api_key", "version", "direction"), CASES)
def test_reader_sets_all_fields_in_every_version(api_key: int, version: int, direction: str) -> None:
    entity = messages._schema(api_key, version, direction)
    data = kio_bytes(entity, random_message(Random(1), entity))
    struct = messages._decode(api_key, version, direction, data)
    assert set(vars(struct)) == set(messages.merged_schema(api_key, direction).defaults)


@pytest.mark.parametrize("api", KAFKAS, ids=lambda api: api.key.name)
def test_flexible_versions_match_kio(api: Api) -> None:
    for version in schema_name_map[api_key_map[api.key]]:
        for direction in (REQUEST, RESPONSE):
            assert messages._schema(api.key, version, direction).__flexible__ == is_flexible(api.key, version)


@pytest.mark.parametrize("api", KAFKAS, ids=lambda api: api.key.name)
def test_supported_versions_exist_and_newer_ones_have_a_reason(api: Api) -> None:
    known = schema_name_map[api_key_map[api.key]]
    assert set(range(api.min_version, api.max_version + 1)) <= set(known)
    assert bool(api.newer_unsupported_reason) == (max(known) > api.max_version)
    assert not api.newer_unsupported_reason or re.match(
        rf"{api.max_version + 1}\b", api.newer_unsupported_reason
    )
