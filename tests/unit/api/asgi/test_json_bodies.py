"""Large JSON bodies: what is parsed in pieces is what a parser of the whole returns, and counting builds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter

from mansio.api.asgi import json_bodies
from mansio.api.asgi.json_bodies import ElementReader, check_keys, count_values, split_list, value_counts
from mansio.api.asgi.problems import InvalidField
from mansio.api.turns import Turns
from mansio.errors import MessageTooLarge
from mansio.host import item_turns
from support.tiers import examples

ANY = TypeAdapter(list[dict[str, Any]])
TEXTS = ("", "a", '"', "\\", "\\\\", '\\"', "é", "😀", "[{,:}]", "\n", "x" * 100)


def read(body: bytes, elements_max: int = 1_000) -> list[Any]:
    """Return the elements of a body that is parsed in pieces."""

    async def run() -> list[Any]:
        async with Turns() as turns:
            reader = ElementReader(body, "records", turns)
            return [each async for piece in reader.pieces(ANY, elements_max) for each in piece]

    return asyncio.run(run())


def random_value(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(7 if depth < 4 else 5)
    if kind == 5:
        return [random_value(random, depth + 1) for _ in range(random.randrange(5))]
    if kind == 6:
        return random_object(random, depth + 1)
    return (random.choice(TEXTS), random.randrange(-5, 10**6), 1.5, None, True)[kind]


def random_object(random: Random, depth: int = 0) -> dict[str, Any]:
    return {random.choice(TEXTS) + str(n): random_value(random, depth) for n in range(random.randrange(5))}


def random_body(random: Random) -> bytes:
    content = {"records": [random_object(random) for _ in range(random.randrange(1, 150))]}
    separators = random.choice([(",", ":"), (", ", ": "), (" \n,\t", "\r : ")])
    return json.dumps(content, ensure_ascii=random.random() < 0.5, separators=separators).encode()


@pytest.mark.parametrize("seed", range(examples(10, 30)))
def test_a_body_in_pieces_has_the_elements_of_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(json_bodies, "PIECE_BYTES", random.choice([1, 7, 64, 1_000]))
    body = random_body(random)
    assert read(body) == json.loads(body)["records"]


@pytest.mark.parametrize("seed", range(examples(10, 30)))
def test_what_a_parser_of_the_whole_refuses_is_refused_in_pieces(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    monkeypatch.setattr(json_bodies, "PIECE_BYTES", random.choice([1, 7, 64, 1_000]))
    body = bytearray(random_body(random))
    for _ in range(40):
        at = random.randrange(len(body))
        broken = (
            body[:at] + random.choice([b"", b",", b'"', b"}", b"]", b"\\", b"\xff", b"1"]) + body[at + 1 :]
        )
        try:
            whole = json.loads(bytes(broken))["records"]
        except (ValueError, KeyError, TypeError):
            with pytest.raises(InvalidField):
                read(bytes(broken))
        else:
            with contextlib.suppress(InvalidField):  # it can be JSON of another form
                assert read(bytes(broken)) == whole


@pytest.mark.parametrize("seed", range(examples(10, 30)))
def test_no_value_is_left_uncounted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(json_bodies, "_STRING_CHARACTERS", random.choice([2, 3, 7, 1_000]))
    content = [random_value(random) for _ in range(20)]
    text = json.dumps(content, ensure_ascii=random.random() < 0.5)

    def values(each: Any) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        return 1 + sum(map(values, inner))

    *_, found = value_counts(text + ",[1,2,3]", 0)
    assert values(content) <= found <= 2 * values(content)


def test_too_many_values_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "VALUES_MAX", 1_000)
    monkeypatch.setattr(json_bodies, "PIECE_BYTES", 1_000)
    built = 0

    def count_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal built
        built += 1
        return dict(pairs)

    monkeypatch.setattr(json_bodies, "_DECODER", json.JSONDecoder(object_pairs_hook=count_object))
    with pytest.raises(InvalidField, match="values"):
        read(b'{"records":[{"json":[' + b"{}," * 100_000 + b"{}]}]}")
    with pytest.raises(InvalidField, match="more than 1000"):
        read(b'{"records":[' + b"{}," * 100_000 + b"{}]}")
    assert built < 3_000

    async def count() -> None:
        async with Turns() as turns:
            await count_values(b"[" + b"[]," * 100_000 + b"1]", turns, 1_000)

    with pytest.raises(InvalidField, match="values"):
        asyncio.run(count())


def test_a_large_element_is_refused_and_those_behind_it_are_not_counted_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_bodies, "VALUES_MAX", 100)
    monkeypatch.setattr(json_bodies, "PIECE_BYTES", 1_000)
    monkeypatch.setattr(json_bodies, "VALUE_BYTES_MAX", 20_000)
    body = b'{"records":[{"value":"' + b'\\"' * 2_000 + b'"}' + b',{"a":[1,2]}' * 900 + b"]}"
    assert len(read(body)) == 901
    with pytest.raises(MessageTooLarge):
        read(b'{"records":[{"value":"' + b"x" * 100_000 + b'"}]}')


def test_other_work_runs_between_the_elements_of_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_turns, "TURN_S", 0.0)
    turns_of_others = 0

    async def run() -> None:
        nonlocal turns_of_others
        turns = Turns()

        async def parse() -> None:
            async with turns:
                reader = ElementReader(b'{"records":[' + b"{}," * 500 + b"{}]}", "records", turns)
                async for _ in reader.pieces(ANY, 1_000):
                    pass

        parsing = [asyncio.ensure_future(parse()) for _ in range(3)]
        while not all(each.done() for each in parsing):
            turns_of_others += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert turns_of_others >= 1_500


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a":1,"a":2}', "'a'"),
        (b'{"x":[{"b":{},"c":1,"b":{}}]}', "'b'"),
        (b'{"a":1,"\\u0061":2}', "'a'"),
    ],
)
def test_a_repeated_key_is_named(body: bytes, name: str) -> None:
    with pytest.raises(InvalidField, match=name):
        check_keys(body)
    check_keys(body.replace(b'"b":{},', b"").replace(b',"a":2', b"").replace(b',"\\u0061":2', b""))


def elements(parts: list[bytes]) -> list[Any] | None:
    """Return the elements of bodies; None if one of them is not JSON of the form `{"records": [...]}`."""
    found: list[Any] = []
    for part in parts:
        try:
            body = json.loads(part)
        except ValueError:
            return None
        if list(body) != ["records"] or part.count(b'"records"') > 1:
            return None
        found += body["records"]
    return found


def test_a_list_in_parts_has_the_elements_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a text or a nested value looks like the end of an element: the parts are then no JSON."""
    chance = Random(5)
    split = 0
    for _ in range(examples(200, 2_000)):
        monkeypatch.setattr(json_bodies, "PART_BYTES", chance.randrange(1, 60))
        records: list[Any] = [
            {
                "value": chance.choice((*TEXTS, '"}, {"', "},{", '\\"},{"', "]},{")),
                "json": chance.choice(([{"a": 1}, {"b": [{}, {}]}], {}, 1)),
            }
            for _ in range(chance.randrange(1, 9))
        ]
        separators = chance.choice((None, (",", ":"), (" , ", " : ")))
        body = json.dumps(
            {"records": records}, separators=separators, ensure_ascii=chance.random() < 0.5
        ).encode()
        parts = split_list(body, "records")
        found = elements(parts)
        assert found is None or found == records
        split += found is not None and len(parts) > 1
    assert split, "some lists are split"


def test_a_list_of_flat_elements_is_split_into_parts_of_a_bounded_size() -> None:
    body = b'{"records":[' + b",".join(b'{"value":"%08d"}' % number for number in range(20_000)) + b"]}"
    parts = split_list(body, "records")
    assert max(map(len, parts)) < json_bodies.PART_BYTES + 100
    assert elements(parts) == json.loads(body)["records"]


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"others":[]}', b'{"records":{}}', b"\xff" * 100_000])
def test_a_body_of_another_form_is_one_part(body: bytes) -> None:
    assert split_list(body, "records") == [body]


def test_a_member_behind_the_list_is_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is refused as in a whole body, also a second list of the same name."""
    monkeypatch.setattr(json_bodies, "PART_BYTES", 1)
    for more in (b"records", b"others"):
        body = b'{"records":[{"a":1},{"a":2}],"%b":[{"a":3},{"a":4}]}' % more
        assert elements(split_list(body, "records")) is None
