"""`read_group_keys` returns the key of a record, or the value of its last header of one name, as the full decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_group_keys, read_records
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import NewRecord

NAMES = st.sampled_from(("tenant", "tenan", "tenants", "x", "größe"))
TEXTS = st.one_of(st.none(), st.binary(max_size=6), st.just(b"\x0ctenant"))
HEADERS = st.lists(st.tuples(NAMES, TEXTS), max_size=3).map(tuple)
RECORDS = st.lists(st.tuples(st.just(1_000), TEXTS, TEXTS, HEADERS), min_size=1, max_size=8)


@settings(max_examples=examples(40, 400))
@given(records=RECORDS, name=st.one_of(st.just(""), NAMES), codec=st.sampled_from((Codec.NONE, Codec.GZIP)))
def test_the_group_key_is_the_record_key_or_the_last_header(
    records: list[NewRecord], name: str, codec: Codec
) -> None:
    batch = build_batch(records, base_offset=7, codec=codec)
    wanted = []
    for record in read_records(batch, output_bytes_max=1 << 20):
        values = [value for header, value in record.headers if header == name]
        key = record.key if not name else values[-1] if values else None
        wanted.append((record.offset, key))
    assert list(read_group_keys(batch, name)) == wanted
