"""Contexts and settings of clients: what applies where, and who may read passwords."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.net import contexts as contexts_module
from mansio.net.contexts import (
    Context,
    Contexts,
    contexts_path,
    load_contexts,
    resolve_security,
    store_contexts,
)
from mansio.net.security_settings import VARIABLES, SecuritySettings

if TYPE_CHECKING:
    from pathlib import Path

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
SECURITY = st.builds(
    SecuritySettings,
    tls=st.just(True) | TEXTS,
    user=TEXTS,
    password=TEXTS,
    mechanism=st.sampled_from(["", "PLAIN", "SCRAM-SHA-512"]),
    certificate=TEXTS,
    key=TEXTS,
)
HERE = "a.example:9093"
ALICE = SecuritySettings(tls=True, user="alice", password="secret of alice")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in (*VARIABLES.values(), "MANSIO_CONTEXT"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(by_name=st.dictionaries(NAMES, st.builds(Context, st.just("a:1,[::1]:2"), SECURITY), max_size=4))
def test_contexts_are_read_as_they_were_stored(by_name: dict[str, Context]) -> None:
    contexts = Contexts(by_name, next(iter(by_name), None))
    store_contexts(contexts)
    assert load_contexts() == contexts


def test_a_file_out_of_reach_is_necessary_only_if_it_is_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(path: str, *arguments: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(contexts_module, "open", unreachable, raising=False)
    assert load_contexts() == Contexts()
    assert resolve_security(HERE, {"tls": "ca.pem"}).tls == "ca.pem"
    with pytest.raises(ConfigError, match="Permission denied"):
        load_contexts(is_necessary=True)
    monkeypatch.setenv("MANSIO_CONTEXT", "here")
    with pytest.raises(ConfigError, match="Permission denied"):
        resolve_security(HERE)


def test_the_file_is_for_its_user_alone(home: Path) -> None:
    store_contexts(Contexts({"here": Context(HERE, ALICE)}, "here"))
    assert stat.S_IMODE(os.stat(contexts_path()).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(home / "mansio").st_mode) == 0o700
    for mode in (0o640, 0o604, 0o660):
        os.chmod(contexts_path(), mode)
        with pytest.raises(ConfigError, match="chmod 600") as caught:
            resolve_security(HERE)
        assert "secret of alice" not in str(caught.value)


def test_a_context_applies_to_its_own_addresses_only() -> None:
    store_contexts(
        Contexts({"one": Context(f"{HERE},b.example:9093", ALICE), "two": Context("c.example:9092")}, "one")
    )
    assert resolve_security(HERE) == ALICE
    assert resolve_security("b.example:9093") == ALICE
    for other in ("a.example:9092", "evil.example:9093", f"{HERE},evil.example:9093", "c.example:9092"):
        assert resolve_security(other) == SecuritySettings(), other


def test_what_is_given_precedes_the_environment_which_precedes_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_contexts(Contexts({"one": Context(HERE, ALICE)}))
    assert resolve_security(HERE) == ALICE
    monkeypatch.setenv("MANSIO_USER", "bob")
    monkeypatch.setenv("MANSIO_TLS", "ca.pem")
    with pytest.raises(ConfigError, match="user 'bob' has no password"):
        resolve_security(HERE)  # not alice's
    monkeypatch.setenv("MANSIO_PASSWORD", "bobs")
    assert resolve_security(HERE) == SecuritySettings("ca.pem", "bob", "bobs")
    with pytest.raises(ConfigError, match="user 'carol' has no password"):
        resolve_security(HERE, {"user": "carol"})
    given_settings = {"user": "carol", "password": "x", "tls": None}
    assert resolve_security(HERE, given_settings) == SecuritySettings("ca.pem", "carol", "x")
    assert resolve_security(HERE, {"tls": False, "user": "", "password": ""}) == SecuritySettings()


@pytest.mark.parametrize(
    "stated", [{"api_key": "mansio_1"}, {"token": "t"}, {"token_provider": str}, {"user": "", "password": ""}]
)
def test_another_credential_takes_the_place_of_the_user_of_a_context(stated: dict[str, Any]) -> None:
    store_contexts(Contexts({"here": Context(HERE, replace(ALICE, mechanism="PLAIN"))}))
    assert resolve_security(HERE, stated) == SecuritySettings(tls=True, **stated)


def test_api_key_of_a_context_is_used_and_gives_way_to_a_user() -> None:
    by_key = SecuritySettings(tls=True, api_key="mansio_1")
    store_contexts(Contexts({"here": Context(HERE, by_key)}))
    assert resolve_security(HERE) == by_key
    bob: dict[str, Any] = {"user": "bob", "password": "bobs"}
    assert resolve_security(HERE, bob) == SecuritySettings(tls=True, **bob)


@pytest.mark.parametrize(
    ("text", "tls"), [("true", True), ("1", True), ("no", False), ("", False), ("/ca.pem", "/ca.pem")]
)
def test_the_variable_for_tls_is_a_flag_or_a_file(
    text: str, tls: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_TLS", text)
    assert resolve_security(HERE).tls == tls


@pytest.mark.parametrize(
    "content",
    [
        "current = 1",
        "other = 1",
        "contexts = 1",
        "[contexts]\none = 1",
        "[contexts.one]",
        '[contexts.one]\nbootstrap_servers = "a b"',
        '[contexts.one]\nbootstrap_servers = "a"\npasswort = "secret of alice"',
        '[contexts.one]\nbootstrap_servers = "a"\nuser = "alice"',
        '[contexts.one]\nbootstrap_servers = "a"\npassword = "secret of alice"',
        '[contexts.one]\nbootstrap_servers = "a"\npassword = "secret of alice',
        '[contexts.one]\nbootstrap_servers = "a"\nuser = true\npassword = "secret of alice"',
    ],
)
def test_an_invalid_file_is_refused_in_one_line_without_the_password(home: Path, content: str) -> None:
    (home / "mansio").mkdir()
    path = home / "mansio" / "contexts.toml"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_contexts()
    assert "secret of alice" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store_contexts(Contexts({"one": Context(HERE)}, "one"))
    monkeypatch.setenv("MANSIO_CONTEXT", "two")
    with pytest.raises(ConfigError, match="'two'"):
        load_contexts().current_context()


def test_no_text_of_the_settings_has_the_password_and_processes_can_pass_them_on() -> None:
    security = SecuritySettings(
        "ca.pem", "alice", "secret of alice", certificate="c", key_password="secret of key"
    )
    assert "secret" not in f"{security} {security!r} {security.credentials()!r}"
    assert pickle.loads(pickle.dumps(security)) == security
    with pytest.raises(TypeError):
        pickle.dumps(security.credentials())


@pytest.mark.parametrize(
    "values", [{"user": "a"}, {"password": "p"}, {"key": "k", "tls": True}, {"certificate": "c"}]
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SecuritySettings(**values)  # type: ignore[arg-type]


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for values, named in (
        ({"tls": str(tmp_path / "missing.pem")}, "missing.pem"),
        ({"tls": str(wrong)}, "wrong.pem"),
        ({"tls": True, "certificate": str(wrong)}, "wrong.pem"),
        ({"tls": True, "certificate": str(tmp_path)}, str(tmp_path)),
        ({"tls": True, "authorities": "no certificate"}, "authorities"),
    ):
        with pytest.raises(ConfigError, match=named):
            SecuritySettings(**values).tls_context()
