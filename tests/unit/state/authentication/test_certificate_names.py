"""Users of client certificates have the names that they have in Kafka, or none."""

from __future__ import annotations

import base64
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.state.authentication.certificate_names import (
    RULES_MAX,
    SUBJECT_BYTES_MAX,
    SUBJECT_CHARACTERS_MAX,
    InvalidSubject,
    MappingRules,
    print_subject,
    read_subject,
    user_of_certificate,
)
from support.certificate_subjects import (
    BMP,
    COMMON_NAME,
    EMAIL,
    GENERAL,
    IA5,
    NUMERIC,
    PRINTABLE,
    SEQUENCE,
    SERIAL_NUMBER,
    SET,
    T61,
    UNIVERSAL,
    UTF_8,
    attribute,
    common_name,
    element,
    number,
    random_subject,
    subject,
)

CERTIFICATE = base64.b64decode(
    "MIICPDCCAeGgAwIBAgIUJWCMjmDvxqF6x0Z6gQR/VBkqcX8wCgYIKoZIzj0EAwIwczELMAkGA1UEBhMCREUxFjAUBgNVBAoM"
    "DUdyw7bDn2UsIEdtYkgxHTAJBgNVBAUTAjc3MBAGA1UECwwJU2VydmljZSMxMQ8wDQYDVQQDDAYgYWxpY2UxHDAaBgkqhkiG"
    "9w0BCQEWDWFAZXhhbXBsZS5jb20wHhcNMjYxMTI5MTYyMjU5WhcNMzYxMTI2MTYyMjU5WjBzMQswCQYDVQQGEwJERTEWMBQG"
    "A1UECgwNR3LDtsOfZSwgR21iSDEdMAkGA1UEBRMCNzcwEAYDVQQLDAlTZXJ2aWNlIzExDzANBgNVBAMMBiBhbGljZTEcMBoG"
    "CSqGSIb3DQEJARYNYUBleGFtcGxlLmNvbTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABOlkOhagM5JMC0z+CO3/7VBz0p8N"
    "Ra1AipGTPjesFRheeOq/OZ8yK3YPgR9+xDmVB6IuNL8zA2hsvDotRmI0DxejUzBRMB0GA1UdDgQWBBRhkZw6bMi7E6r62wXB"
    "FjAmrSX5mzAfBgNVHSMEGDAWgBRhkZw6bMi7E6r62wXBFjAmrSX5mzAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0kA"
    "MEYCIQDfPX7qVVVpa11b5nW8nsYIlnePCrhBu6F+91/fyuSfEQIhAIERP14AHx+nq5G9S0bHnPEgWZJVPM72wY/d25q/+lnd"
)
"""Made by OpenSSL."""
NAME = (
    r"1.2.840.113549.1.9.1=#160d61406578616d706c652e636f6d,CN=\ alice,2.5.4.5=#13023737+OU=Service\#1,"
    r"O=Größe\, GmbH,C=DE"
)
"""As Java 17 prints its subject."""


def test_the_subject_of_a_certificate_is_printed_as_by_java() -> None:
    assert print_subject(read_subject(CERTIFICATE)) == NAME
    assert user_of_certificate(CERTIFICATE, MappingRules()) == NAME
    assert user_of_certificate(CERTIFICATE, MappingRules(r"RULE:.*CN=\\ ([^,]*),.*/$1/U")) == "ALICE"


# The expectations are what Java 17 and Java 25 print; tests/system/interop/test_certificate_names_java.py asks one.
@pytest.mark.parametrize(
    ("encoded", "printed"),
    [
        (common_name("Duke"), "CN=Duke"),
        (common_name("größe € 😀"), "CN=größe € 😀"),
        (common_name(""), "CN="),
        (common_name("  a b \r "), r"CN=\ \ a b" + "\\ \\\r\\ "),
        (common_name("  "), r"CN=\ \ "),
        (common_name("#a#"), r"CN=\#a\#"),
        (common_name(',=+<>#;"\\'), r"CN=\,\=\+\<\>\#\;\"\\"),
        (common_name("a\0b\n"), "CN=a\\00b\n"),
        (common_name("a", PRINTABLE), "CN=a"),
        (common_name("a", T61), "CN=a"),
        (common_name("a", IA5), "CN=a"),
        (common_name("a", GENERAL), "CN=a"),
        (common_name("1", NUMERIC), "CN=#120131"),
        (subject([attribute(COMMON_NAME, b"\0\0\0a", UNIVERSAL)]), "CN=#1c0400000061"),
        (subject([attribute(EMAIL, b"a@b", IA5)]), "1.2.840.113549.1.9.1=#1603614062"),
        (subject([attribute(SERIAL_NUMBER, b"7", PRINTABLE)]), "2.5.4.5=#130137"),
        (subject([attribute("2.999.3", b"x")]), "2.999.3=#0c0178"),
        (subject([attribute("2.5.4.6", b"DE")], [attribute(COMMON_NAME, b"a")]), "CN=a,C=DE"),
        (
            subject(
                [attribute(COMMON_NAME, b"b"), attribute("2.5.4.11", b"a")], [attribute("2.5.4.10", b"o")]
            ),
            "O=o,CN=b+OU=a",
        ),
        (subject(), ""),
        (common_name("x" * 300), "CN=" + "x" * 300),
    ],
)
def test_a_subject_is_printed_as_by_java(encoded: bytes, printed: str) -> None:
    assert print_subject(encoded) == printed


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (b"\xff", UTF_8),
        (b"a\xc3", UTF_8),
        (b"\xed\xa0\x80", UTF_8),
        ("é".encode(), PRINTABLE),
        (b"\xe9", T61),
        ("é".encode(), IA5),
        (b"\xe9", GENERAL),
        ("ab".encode("utf-16-be"), BMP),
    ],
)
def test_a_subject_that_versions_of_java_print_differently_is_refused(value: bytes, tag: int) -> None:
    with pytest.raises(InvalidSubject, match="encoding"):
        print_subject(subject([attribute(COMMON_NAME, value, tag)]))
    assert print_subject(subject([attribute(EMAIL, value, tag)])).startswith("1.2.840.113549.1.9.1=#")


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_different_subjects_have_different_names(first: int, second: int) -> None:
    """Apart from the type of a text, and the order of attributes within one relative name."""
    one, other = random_subject(Random(first)), random_subject(Random(second))
    texts = bytes.maketrans(bytes((PRINTABLE, T61, IA5, GENERAL)), bytes([UTF_8]) * 4)
    if one.translate(texts) != other.translate(texts):
        assert print_subject(one) != print_subject(other)


@pytest.mark.parametrize(
    "malformed",
    [
        b"",
        b"\x30",
        b"\x30\x80\x00\x00",
        b"\x30\x84\x00\x00\x00\x00",
        b"\x30\x82\x00",
        b"\x30\x05",
        common_name("a") + b"\0",
        element(SET, b""),
        element(SEQUENCE, element(SEQUENCE, b"")),
        element(SEQUENCE, element(SET, element(SET, b""))),
        element(SEQUENCE, element(SET, element(SEQUENCE, b""))),
        element(SEQUENCE, element(SET, element(SEQUENCE, number(COMMON_NAME)))),
        element(SEQUENCE, element(SET, element(SEQUENCE, number(COMMON_NAME) + element(UTF_8, b"a") * 2))),
        element(SEQUENCE, element(SET, element(SEQUENCE, element(0x06, b"") + element(UTF_8, b"a")))),
        element(SEQUENCE, element(SET, element(SEQUENCE, element(0x06, b"\x55\x84") + element(UTF_8, b"a")))),
        subject([element(SEQUENCE, element(0x06, b"\xff" * 4_000 + b"\x01") + element(UTF_8, b"a"))]),
        subject([element(SEQUENCE, element(0x06, b"\x55\x04\x80\x03") + element(UTF_8, b"a"))]),
        common_name("x" * SUBJECT_BYTES_MAX),
    ],
)
def test_a_malformed_or_huge_subject_is_refused(malformed: bytes) -> None:
    with pytest.raises(InvalidSubject):
        print_subject(malformed)


def test_no_part_and_no_changed_byte_of_a_certificate_raises_anything_else() -> None:
    inputs = [CERTIFICATE[:length] for length in range(len(CERTIFICATE))]
    inputs += [
        CERTIFICATE[:at] + bytes([CERTIFICATE[at] ^ mask]) + CERTIFICATE[at + 1 :]
        for at in range(len(CERTIFICATE))
        for mask in (0x01, 0x80, 0xFF)
    ]
    for certificate in inputs:
        with suppress(InvalidSubject):
            print_subject(read_subject(certificate))


def kafka_rules(*rules: str) -> MappingRules:
    return MappingRules(", ".join(rules))


# From SslPrincipalMapperTest of Kafka.
@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("CN=Duke,OU=ServiceUsers,O=Org,C=US", "duke"),
        ("CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "duke@sme"),
        ("cn=duke,ou=sme,dc=mycp,dc=com", "DUKE@SME"),
        ("cN=duke,OU=JavaSoft,O=Sun Microsystems", "DUKE"),
        ("OU=JavaSoft,O=Sun Microsystems,C=US", "OU=JavaSoft,O=Sun Microsystems,C=US"),
    ],
)
def test_the_first_rule_that_matches_the_whole_subject_gives_the_name(name: str, mapped: str) -> None:
    rules = kafka_rules(
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L",
        "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L",
        "RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U",
        "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U",
        "DEFAULT",
    )
    assert rules.name(name) == mapped


def test_a_subject_that_no_rule_matches_as_a_whole_is_refused() -> None:
    for rules in ("", " , ,", "RULE:^CN=(.*?),OU=a$/$1/", "RULE:CN=a/x/"):
        for name in ("CN=a,OU=b", "CN=a,OU=a,O=b", "xCN=a", "CN=ab", ""):
            with pytest.raises(InvalidSubject, match="no rule"):
                MappingRules(rules).name(name)
    with pytest.raises(InvalidSubject):
        MappingRules("DEFAULT").name("")
    with pytest.raises(InvalidSubject):
        MappingRules("RULE:(.*)//, DEFAULT").name("CN=a")


def test_commas_and_spaces_in_patterns_belong_to_them() -> None:
    rules = MappingRules(r"RULE:^CN=((\\, *|\w)+)(,.*|$)/$1/,DEFAULT")
    assert rules.name(r"CN=Tkac\, Adam,OU=ITZ,DC=geodis,DC=cz") == r"Tkac\, Adam"
    many = MappingRules(
        r"RULE:,RULE:,/,RULE:,\//U,RULE:,/RULE:,/,RULE:,RULE:,/L,RULE:,/L,RULE:, DEFAULT, /DEFAULT/,DEFAULT"
    )
    assert [many.name(name) for name in (",RULE:,", ",", ", DEFAULT, ", "CN=a")] == [
        ",RULE:,/",
        "RULE:,",
        "DEFAULT",
        "CN=a",
    ]
    assert MappingRules("  RULE:   /  x   /U   ,  DEFAULT  ").name("   ") == "  X   "
    assert MappingRules(",,RULE:a/b/,,,DEFAULT,,").name("a") == "b"
    assert MappingRules(r"RULE:a\/(b)/\/$1\$1\\/").name("a/b") == "/b$1\\"


@pytest.mark.parametrize(
    ("replacement", "name"),
    [
        ("$1", "a"),
        ("$2$1", "ba"),
        ("$0", "a,b"),
        ("$3", "$3"),
        ("$12", "a2"),
        ("$30", "$30"),
        (r"\$1", "$1"),
        ("x$2y", "xby"),
        ("$" + "9" * 5_000, "$" + "9" * 5_000),
    ],
)
def test_references_to_groups_mean_what_they_mean_in_kafka(replacement: str, name: str) -> None:
    assert MappingRules(f"RULE:(.*),(.*)/{replacement}/").name("a,b") == name


@pytest.mark.parametrize(
    "rules",
    [
        "default",
        "DEFAUL",
        "DEFAULT/L",
        "DEFAULT/U",
        "DEFAULTRULE:a/b/",
        "RULE:CN=(.*?),OU=ServiceUsers.*/$1",
        "rule:^CN=(.*?),OU=ServiceUsers.*$/$1/",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L/U",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/L",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/U",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/LU",
        "RULE:a/b/X",
        "RULE:(/b/",
        "RULE:(?=a)/b/",
        "RULE:a/$/",
        "RULE:a/${name}/",
        "DEFAULT," * (RULES_MAX + 1),
    ],
)
def test_invalid_rules_are_refused_with_the_setting_s_name(rules: str) -> None:
    with pytest.raises(ConfigError, match="ssl_principal_mapping_rules"):
        MappingRules(rules)


def test_a_long_subject_is_not_matched_with_patterns() -> None:
    rules = MappingRules("RULE:(.*)/$1/")
    longest = "x" * SUBJECT_CHARACTERS_MAX
    assert rules.name(longest) == longest
    with pytest.raises(InvalidSubject, match="characters"):
        rules.name(longest + "x")
