"""Settings of a cluster: accepted values, refused values and their messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tools.command_reference import reference

from mansio.config.cluster import MemberAddress, parse_members
from mansio.config.settings import SPECIFICATIONS, Settings
from mansio.errors import ConfigError

THREE = "b,a:2390/2391,[::1]"


def test_broker_is_single_without_etcd_settings() -> None:
    alone, one_of_many = Settings(), Settings(etcd_endpoints="http://10.0.0.1:2379")
    assert (alone.clustered, alone.etcd_urls, alone.replication_factor) == (False, (), 1)
    assert (one_of_many.clustered, one_of_many.replication_factor) == (True, 3)


def test_urls_are_unique_and_have_the_default_port_of_etcd() -> None:
    settings = Settings(etcd_endpoints=" http://a:1/, http://b ,http://a:1,http://[::1]:5")
    assert settings.etcd_urls == ("http://a:1", "http://b:2379", "http://[::1]:5")


def test_members_are_sorted_and_the_own_one_is_tried_first() -> None:
    members = parse_members(THREE)
    assert members == parse_members("a:2390/2391,[::1]:2380/2379,B:2380")
    assert members == (MemberAddress("::1"), MemberAddress("a", 2390, 2391), MemberAddress("b"))
    settings = Settings(etcd_join=THREE, advertised_listeners="A:9092", insecure_listen=True)
    assert settings.own_etcd_member() == MemberAddress("a", 2390, 2391)
    assert settings.etcd_urls == ("http://a:2391", "http://[::1]:2379", "http://b:2379")


def test_etcd_member_selects_one_of_several_members_on_a_host() -> None:
    join = "127.0.0.1:1001/1002,127.0.0.1:2001/2002"
    with pytest.raises(ConfigError, match=r"2 members are on 127\.0\.0\.1; set etcd_member"):
        Settings(etcd_join=join)
    settings = Settings(etcd_join=join, etcd_member="127.0.0.1:2001")
    assert settings.own_etcd_member().client_port == 2002


CERTIFICATES: dict[str, Any] = {"etcd_ca_file": "ca", "etcd_cert_file": "cert", "etcd_key_file": "key"}


def test_own_member_with_certificates_uses_https() -> None:
    settings = Settings(etcd_join="127.0.0.1", **CERTIFICATES)
    assert settings.etcd_urls == ("https://127.0.0.1:2379",)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"etcd_endpoints": "10.0.0.1:2379"}, "etcd_endpoints: '10.0.0.1:2379' is not http://HOST:PORT"),
        ({"etcd_endpoints": "http://a:1,https://b:1"}, "etcd_endpoints: some URLs are http and some https"),
        ({"etcd_endpoints": "http://user:secret@a:1"}, "etcd_endpoints: "),
        ({"etcd_endpoints": "http://a:99999"}, "etcd_endpoints: "),
        ({"etcd_endpoints": ","}, "etcd_endpoints: it contains no URL"),
        ({"etcd_endpoints": "http://a", "etcd_join": "127.0.0.1"}, "etcd_join: it excludes etcd_endpoints"),
        ({"etcd_endpoints": "http://a", "etcd_member": "a"}, "etcd_member: it requires etcd_join"),
        ({"etcd_join": "127.0.0.1,127.0.0.1"}, "etcd_join: two members have the same host"),
        ({"etcd_join": "a_b,a-b"}, "etcd_join: two members have the same host"),
        ({"etcd_join": "127.0.0.1:5/5"}, "etcd_join: '127.0.0.1:5/5' is not HOST"),
        ({"etcd_join": "127.0.0.1:0"}, "etcd_join: '127.0.0.1:0' is not HOST"),
        ({"etcd_join": "::1"}, "etcd_join: '::1' is not HOST"),
        (
            {"etcd_join": ",".join(f"h{n}" for n in range(8))},
            "etcd_join: 8 members; the maximum is 7",
        ),
        ({"etcd_join": "a,b"}, "etcd_join: no member is on 127.0.0.1, the host of advertised_listeners"),
        ({"etcd_join": "a,b", "etcd_member": "c"}, "etcd_member: c is not in etcd_join"),
        (
            {"etcd_endpoints": "http://a", "listeners": "0.0.0.0:9092"},
            "advertised_listeners: 0.0.0.0 is no address to connect to",
        ),
        (
            {"etcd_endpoints": "http://a", "advertised_listeners": "b:0"},
            "advertised_listeners: port 0 is no port to connect to",
        ),
        (
            {"etcd_endpoints": "http://127.0.0.1", "etcd_user": "u"},
            "etcd_user: it requires etcd_password_file",
        ),
        (
            {"etcd_endpoints": "http://10.0.0.1", "etcd_user": "u", "etcd_password_file": "f"},
            "etcd_user: the password would be sent unencrypted",
        ),
        (
            {"etcd_endpoints": "http://a", **CERTIFICATES},
            "etcd_ca_file: the URLs in etcd_endpoints are not https",
        ),
        ({"etcd_endpoints": "https://a", "etcd_cert_file": "c"}, "etcd_cert_file: it requires etcd_key_file"),
        ({"etcd_join": "127.0.0.1", "etcd_ca_file": "c"}, "etcd_ca_file: an own member needs"),
        ({"etcd_user": "u"}, "etcd_user: it requires etcd_endpoints or etcd_join"),
        ({"etcd_member": "u"}, "etcd_member: it requires etcd_endpoints or etcd_join"),
        (
            {"broker_session_timeout_ms": 1999},
            "broker_session_timeout_ms: 1999 is below the minimum, 2000 ms",
        ),
    ],
)
def test_invalid_cluster_settings_are_one_line_that_begins_with_the_setting(
    given: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**given)  # type: ignore[arg-type]  # as given
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)
    assert "secret" not in complaint


def test_cluster_document_names_only_existing_settings_and_flags() -> None:
    document = (Path(__file__).parents[3] / "docs/how-to/cluster.md").read_text()
    settings = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", document))
    assert len(settings) > 10
    log_events = {
        "corrupt_batch",
        "damage_repaired",
        "etcd_member_starting",
        "log_failed",
        "metadata_image_failed",
        "repair_failed",
        "too_few_hosts",
        "view_not_loaded",
    }
    metrics = {name for name in settings if name.startswith("mansio_")}  # see test_process_monitoring.py
    assert settings - set(SPECIFICATIONS) - log_events - metrics == set()
    commands = "\n".join(line for line in document.splitlines() if "etcdctl" not in line)
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", commands))
    assert len(flags) > 10
    assert flags - set(re.findall(r"--[a-z-]+", reference())) == set()
