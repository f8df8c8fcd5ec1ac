"""The Query protocol: lists and maps of one item with and without a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.api.sqs.query_protocol import decode
from mansio.api.sqs.queues.queue_errors import InvalidParameterValue
from mansio.api.sqs.shapes import REQUESTS

if TYPE_CHECKING:
    from mansio.api.sqs.shapes import Shape

MANY = [
    (action, name)
    for action, shape in REQUESTS.items()
    for name, member in (shape.members or {}).items()
    if member.kind in ("list", "map")
]


def required(action: str, but: str) -> dict[str, str]:
    """Values for the other parameters that an action needs."""
    members = REQUESTS[action].members or {}
    return {
        name: "1"
        for name in REQUESTS[action].required
        if name != but and members[name].kind in ("text", "integer")
    }


def one_item(shape: Shape, draw: st.DrawFn) -> dict[str, str]:
    """The parameters of one item, by what follows its name and number, without numbers inside."""
    text = st.text("abc.1 =&", min_size=1, max_size=4)
    if shape.kind == "map":
        assert shape.item is not None
        _, key, value = shape.query_names
        return {f".{key}": draw(text)} | {
            f".{value}{end}": each for end, each in values(shape.item, draw).items()
        }
    assert shape.item is not None
    return values(shape.item, draw)


def values(shape: Shape, draw: st.DrawFn) -> dict[str, str]:
    if shape.kind == "structure":
        found: dict[str, str] = {}
        for name, member in (shape.members or {}).items():
            if member.kind in ("list", "map"):
                if draw(st.booleans()):
                    found |= {
                        f".{member.query_names[0]}{end}": each for end, each in one_item(member, draw).items()
                    }
            else:
                found |= {f".{name}{end}": each for end, each in values(member, draw).items()}
        return found
    if shape.kind == "integer":
        return {"": str(draw(st.integers(0, 1000)))}
    return {"": draw(st.text("abc.1 =&", min_size=1, max_size=4))}


@given(st.sampled_from(MANY), st.data())
def test_one_item_without_a_number_is_a_list_or_map_of_one(
    which: tuple[str, str], data: st.DataObject
) -> None:
    action, name = which
    shape = (REQUESTS[action].members or {})[name]
    item = data.draw(st.composite(lambda draw: one_item(shape, draw))())
    start, others = shape.query_names[0], required(action, name)
    numbered = decode(action, others | {f"{start}.1{end}": each for end, each in item.items()})
    assert len(numbered[name]) == 1
    assert decode(action, others | {f"{start}{end}": each for end, each in item.items()}) == numbered


@pytest.mark.parametrize(
    "form",
    [
        {"AttributeName": "All", "AttributeName.1": "All"},
        {"AttributeName.x": "All"},
        {"AttributeName.1": "All", "AttributeName.x": "All"},
    ],
)
def test_items_with_and_without_numbers_are_refused_together(form: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterValue):
        decode("GetQueueAttributes", {"QueueUrl": "q"} | form)


@pytest.mark.parametrize("form", [{"Attribute": "DelaySeconds"}, {"Attribute.1": "DelaySeconds"}])
def test_an_entry_of_a_map_without_name_and_value_is_refused(form: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterValue):
        decode("SetQueueAttributes", {"QueueUrl": "q"} | form)


def test_an_empty_parameter_is_an_empty_list() -> None:
    assert decode("GetQueueAttributes", {"QueueUrl": "q", "AttributeName": ""})["AttributeNames"] == []
