"""Named listeners in settings: what they mean, and what is refused, as in Kafka (KIP-103, KIP-291, KIP-797)."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mansio.config.addresses import Address
from mansio.config.listeners import (
    DEFAULT_PROTOCOL_MAP,
    LISTENERS_MAX,
    SecurityProtocol,
    format_listeners,
    parse_listeners,
    parse_protocol_map,
    resolve_listeners,
)
from mansio.config.settings import Settings
from mansio.errors import ConfigError
from support.tiers import examples

NAMES = st.text(string.ascii_uppercase + string.digits + "_-", min_size=1, max_size=20)
HOST_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
HOSTS = st.one_of(st.just(""), HOST_NAMES, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str))
ADDRESSES = st.builds(Address, HOSTS, st.integers(0, 65535))
LISTENERS = st.dictionaries(NAMES, ADDRESSES, min_size=1, max_size=LISTENERS_MAX)
INSIDE_OUTSIDE = "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT"


def resolved(listeners: str, advertised: str = "", protocol_map: str = INSIDE_OUTSIDE, name: str = "") -> Any:
    return resolve_listeners(listeners, advertised, protocol_map, name)


@settings(max_examples=examples(50, 500))
@given(LISTENERS)
def test_printed_listeners_are_read_as_the_same_in_the_same_order(addresses: dict[str, Address]) -> None:
    text = format_listeners(addresses)
    assert list(parse_listeners("listeners", text).items()) == list(addresses.items())
    assert list(parse_listeners("listeners", text.lower()).items()) == list(addresses.items())
    assert parse_listeners("listeners", f" {text.replace(',', ' , ')} ,") == addresses


@settings(max_examples=examples(100, 2000))
@given(st.text(string.ascii_letters[:3] + "0159:/[],.-_ %\n\u0661", max_size=30))
def test_any_text_is_read_or_refused_in_one_line_that_begins_with_the_setting(text: str) -> None:
    problem = "listeners: "
    try:
        found = parse_listeners("listeners", text)
    except ConfigError as error:
        problem = str(error)
    else:
        assert parse_listeners("listeners", format_listeners(found)) == found
    assert problem.startswith("listeners: ")
    assert "\n" not in problem


@settings(max_examples=examples(50, 500))
@given(st.dictionaries(NAMES, st.sampled_from(SecurityProtocol), max_size=LISTENERS_MAX))
def test_a_printed_protocol_map_is_read_as_the_same(protocols: dict[str, SecurityProtocol]) -> None:
    text = ",".join(f"{name.lower()}: {protocol.lower()}" for name, protocol in protocols.items())
    assert parse_protocol_map(text) == protocols


@settings(max_examples=examples(50, 500))
@given(LISTENERS, st.data())
def test_a_listener_is_advertised_by_its_entry_or_without_any_entry_by_itself(
    addresses: dict[str, Address], data: st.DataObject
) -> None:
    ports = [address.port for address in addresses.values() if address.port]
    assume(len(set(ports)) == len(ports))
    named = data.draw(st.sets(st.sampled_from(sorted(addresses))))
    advertised = {name: Address("outside.example", 9092) for name in named}
    protocols = ",".join(f"{name}:PLAINTEXT" for name in addresses)
    found = resolved(format_listeners(addresses), format_listeners(advertised), protocols)
    assert {each.name: each.address for each in found.all} == addresses
    for each in found.all:
        assert each.is_advertised == (not named or each.name in named)
        assert each.advertised_address == (advertised[each.name] if each.name in named else each.address)
    assert found.inter_broker.is_advertised


def test_an_address_without_a_name_is_the_listener_plaintext() -> None:
    found = resolve_listeners("0.0.0.0:9092", "broker.example:19092", DEFAULT_PROTOCOL_MAP, "")
    (listener,) = found.all
    assert (listener.name, listener.address) == ("PLAINTEXT", ("0.0.0.0", 9092))
    assert (listener.advertised, listener.security_protocol) == (("broker.example", 19092), "PLAINTEXT")
    assert found.inter_broker is listener


@pytest.mark.parametrize(
    ("listeners", "advertised", "name", "expected"),
    [
        ("A://:1,PLAINTEXT://:2", "", "", "PLAINTEXT"),
        ("B://:1,A://:2", "", "", "B"),
        ("B://:1,A://:2", "", "a", "A"),
        ("B://:1,PLAINTEXT://:2", "B://b:1", "", "B"),
    ],
)
def test_brokers_use_the_named_listener_or_plaintext_or_the_first(
    listeners: str, advertised: str, name: str, expected: str
) -> None:
    protocols = "A:PLAINTEXT,B:PLAINTEXT,PLAINTEXT:PLAINTEXT"
    assert resolved(listeners, advertised, protocols, name).inter_broker.name == expected


@pytest.mark.parametrize(
    ("listeners", "is_allowed"),
    [
        ("INSIDE://127.0.0.1:9092,OUTSIDE://[::1]:9092", True),
        ("INSIDE://0.0.0.0:9092,OUTSIDE://[::]:9092", True),
        ("INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:0", True),
        ("INSIDE://127.0.0.1:9092,OUTSIDE://10.0.0.1:9092", False),
        ("INSIDE://[::1]:9092,OUTSIDE://[::2]:9092", False),
        ("INSIDE://:9092,OUTSIDE://[::1]:9092", False),
        ("INSIDE://a:9092,OUTSIDE://b:9092", False),
        ("INSIDE://127.0.0.1:9092,OUTSIDE://[::1]:9092,THIRD://:9092", False),
    ],
)
def test_only_an_ipv4_and_an_ipv6_address_can_share_a_port(listeners: str, is_allowed: bool) -> None:
    protocols = f"{INSIDE_OUTSIDE},THIRD:PLAINTEXT"
    if is_allowed:
        assert len(resolved(listeners, protocol_map=protocols).all) == 2
    else:
        with pytest.raises(
            ConfigError, match=r"^listeners: . listeners have port 9092; only an IPv4 and an IPv6"
        ):
            resolved(listeners, protocol_map=protocols)


def test_advertised_addresses_may_be_the_same_as_behind_one_load_balancer() -> None:
    found = resolved("INSIDE://:1,OUTSIDE://:2", "INSIDE://lb:9092,OUTSIDE://lb:9092")
    assert {each.advertised for each in found.all} == {("lb", 9092)}


@pytest.mark.parametrize(
    ("given_settings", "complaint"),
    [
        ({"listeners": "A://h:1,a://h:2"}, "listeners: two listeners have the name A"),
        ({"listeners": "h:1,h:2"}, "listeners: two listeners have the name PLAINTEXT"),
        ({"listeners": "A B://h:1"}, "listeners: 'A B' is not a name of letters, digits, '_' and '-'"),
        ({"listeners": "A://h"}, "listeners: 'A://h' is not NAME://host:port"),
        ({"listeners": "A://::1:9092"}, "listeners: 'A://::1:9092' is not NAME://host:port"),
        ({"listeners": "A://h/x:9092"}, "listeners: 'A://h/x:9092' is not NAME://host:port"),
        ({"listeners": ":9092"}, "listeners: ':9092' is not host:port"),
        ({"listeners": ","}, "listeners: ',' is not host:port"),
        (
            {"listeners": ",".join(f"L{number}://h:{number}" for number in range(1, 18))},
            "listeners: 17 listeners; the maximum is 16",
        ),
        (
            {"listeners": "OUTSIDE://h:1"},
            "listener_security_protocol_map: it has no protocol for the listener OUTSIDE; add OUTSIDE:PLAINTEXT",
        ),
        (
            {"listeners": "SSL://h:1"},
            "ssl_certificate_location: listeners with TLS need it",
        ),
        (
            {"listeners": "A://h:1", "listener_security_protocol_map": "A:SASL_SSL"},
            "ssl_certificate_location: listeners with TLS need it",
        ),
        (
            {"listener_security_protocol_map": "A"},
            "listener_security_protocol_map: 'A': the protocol is not one of",
        ),
        (
            {"listener_security_protocol_map": "A:TLS"},
            "listener_security_protocol_map: 'A:TLS': the protocol is not",
        ),
        (
            {"listener_security_protocol_map": "A:SSL,a:SSL"},
            "listener_security_protocol_map: it contains A twice",
        ),
        (
            {"advertised_listeners": "OUTSIDE://h:1"},
            "advertised_listeners: OUTSIDE is not in listeners, which has PLAINTEXT",
        ),
        ({"advertised_listeners": "0.0.0.0:1"}, "advertised_listeners: 0.0.0.0 is no address to connect to"),
        ({"advertised_listeners": "[::]:1"}, "advertised_listeners: :: is no address to connect to"),
        (
            {"advertised_listeners": "PLAINTEXT://:1"},
            "advertised_listeners: an empty host is no address to connect",
        ),
        ({"advertised_listeners": "h:0"}, "advertised_listeners: port 0 is no port to connect to"),
        ({"inter_broker_listener_name": "X"}, "inter_broker_listener_name: X is not PLAINTEXT"),
        (
            {
                "listeners": "PLAINTEXT://h:1,SSL://h:2",
                "listener_security_protocol_map": "PLAINTEXT:PLAINTEXT,SSL:PLAINTEXT",
                "advertised_listeners": "PLAINTEXT://h:1",
                "inter_broker_listener_name": "SSL",
            },
            "inter_broker_listener_name: SSL is not PLAINTEXT",
        ),
        (
            {
                "http_listener": "127.0.0.1:1",
                "registry_listener": "0.0.0.0:2",
                "http_security_protocol": "SASL_PLAINTEXT",
            },
            "http_security_protocol: SASL_PLAINTEXT would send passwords unencrypted to 0.0.0.0:2",
        ),
        (
            {"etcd_endpoints": "http://a", "listeners": "PLAINTEXT://:9092"},
            "advertised_listeners: an empty host is no address to connect to",
        ),
    ],
)
def test_contradictions_are_refused_in_one_line(given_settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**given_settings)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_the_map_may_have_listeners_that_do_not_exist() -> None:
    protocols = f"{DEFAULT_PROTOCOL_MAP},OTHER:SASL_SSL"
    assert len(Settings(listener_security_protocol_map=protocols).kafka_listeners.all) == 1


def test_own_etcd_member_is_on_the_host_that_other_brokers_connect_to() -> None:
    found = Settings(
        etcd_join="a,b,c",
        listeners="OUTSIDE://:19092,INSIDE://:9092",
        advertised_listeners="OUTSIDE://lb.example:443,INSIDE://b:9092",
        listener_security_protocol_map=INSIDE_OUTSIDE,
        inter_broker_listener_name="inside",
        insecure_listen=True,
    )
    assert found.own_etcd_member().host == "b"


def test_properties_of_the_protocols() -> None:
    assert [each for each in SecurityProtocol if each.is_encrypted] == ["SSL", "SASL_SSL"]
    assert [each for each in SecurityProtocol if each.is_authenticated] == ["SASL_PLAINTEXT", "SASL_SSL"]
