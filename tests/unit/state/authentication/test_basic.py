"""HTTP Basic: each value is a user with a password, or is refused without a look at any credential."""

from __future__ import annotations

import base64

import pytest

from mansio.state.authentication.basic import VALUE_CHARACTERS_MAX, read_basic
from mansio.state.authentication.credentials import PASSWORD_BYTES_MAX, USER_BYTES_MAX, ScramMechanism
from mansio.state.authentication.outcomes import Accepted, Rejected
from mansio.state.authentication.plain import PasswordCheck
from support.credentials import credential, directory_of

PASSWORD = "a:b ü"
DIRECTORY = directory_of({"alice": credential(PASSWORD, ScramMechanism.SHA_256)})


def encoded(text: str | bytes, scheme: str = "Basic") -> str:
    data = text.encode() if isinstance(text, str) else text
    return f"{scheme} {base64.b64encode(data).decode()}"


@pytest.mark.parametrize("scheme", ["Basic", "basic", "BASIC"])
def test_the_password_may_contain_colons(scheme: str) -> None:
    check = read_basic(encoded(f"alice:{PASSWORD}", scheme), DIRECTORY)
    assert isinstance(check, PasswordCheck)
    assert isinstance(check.run(0), Accepted)
    assert PASSWORD not in repr(check)


def test_the_longest_user_and_password_fit() -> None:
    value = encoded("u" * USER_BYTES_MAX + ":" + "p" * PASSWORD_BYTES_MAX)
    assert len(value) <= VALUE_CHARACTERS_MAX
    assert isinstance(read_basic(value, DIRECTORY), PasswordCheck)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Basic",
        "Basic !",
        "Basic é",
        "Bearer abc",
        encoded("alice"),
        encoded(":password"),
        encoded("alice:"),
        encoded("alice\0:x"),
        encoded(b"\xff:\xfe"),
        encoded("u" * (USER_BYTES_MAX + 1) + ":p"),
        "Basic " + "A" * VALUE_CHARACTERS_MAX,
    ],
)
def test_other_values_are_refused(value: str) -> None:
    assert isinstance(read_basic(value, DIRECTORY), Rejected)
