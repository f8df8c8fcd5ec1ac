"""Options of `format("mansio")` for TLS and log-ins: those of Spark's Kafka source, and shorter names of Mansio's own.

    kafka.security.protocol          PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL
    kafka.sasl.mechanism             PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512
    kafka.sasl.jaas.config           user and password, for Kafka's login modules of these mechanisms
    kafka.ssl.truststore.*           authorities, in PEM (type=PEM, with location or certificates)
    kafka.ssl.keystore.location      certificate and key of the client, in PEM (type=PEM)

    tls, user, password, mechanism, certificate, key, keyPassword, delegationToken

With `delegationToken=true`, or `tokenauth="true"` in the line of JAAS, user and password are the id and the secret of a
delegation token (KIP-48). With user and password, the driver itself gets one for the tasks (`task_login`), unless
`createDelegationToken=false`.

Files exist on the driver and on each executor. Without any of these options, the environment of the driver and the
user's contexts state how to connect (`net.contexts`), and Spark sees no password at all.

Spark hides an option in plans, its UI and logs if name or value contains "password", "secret" or "token"
(`spark.redaction.regex`). That is so for `password`, `keyPassword`, `kafka.ssl.key.password` and each value of
`kafka.sasl.jaas.config`, but not for a key itself: `kafka.ssl.keystore.key` is refused.

Invariant: no error contains the value of an option that may have a password.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mansio.config.security import PLAIN, SASL_MECHANISMS
from mansio.errors import ConfigError
from mansio.net.contexts import resolve_security
from mansio.net.security_settings import SecuritySettings, parse_tls

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_OPTIONS: Final = {
    "tls": "tls",
    "user": "user",
    "password": "password",
    "mechanism": "mechanism",
    "certificate": "certificate",
    "key": "key",
    "keyPassword": "key_password",
    "delegationToken": "delegation_token",
}
"""Option of Mansio -> setting."""

_PROTOCOL: Final = "kafka.security.protocol"
_MECHANISM: Final = "kafka.sasl.mechanism"
_JAAS: Final = "kafka.sasl.jaas.config"
_TRUST_TYPE: Final = "kafka.ssl.truststore.type"
_TRUST_FILE: Final = "kafka.ssl.truststore.location"
_TRUST_TEXT: Final = "kafka.ssl.truststore.certificates"
_KEY_TYPE: Final = "kafka.ssl.keystore.type"
_KEY_FILE: Final = "kafka.ssl.keystore.location"
_KEY_PASSWORD: Final = "kafka.ssl.key.password"  # noqa: S105  # the name of an option
_CHECKS_NAME: Final = "kafka.ssl.endpoint.identification.algorithm"

KAFKA_OPTIONS: Final = (
    _PROTOCOL,
    _MECHANISM,
    _JAAS,
    _TRUST_TYPE,
    _TRUST_FILE,
    _TRUST_TEXT,
    _KEY_TYPE,
    _KEY_FILE,
    _KEY_PASSWORD,
    _CHECKS_NAME,
)
CREATE_TOKEN_OPTION: Final = "createDelegationToken"  # noqa: S105  # the name of an option
SECURITY_OPTIONS: Final = (*OWN_OPTIONS, CREATE_TOKEN_OPTION, *KAFKA_OPTIONS)
"""All options of this module."""

REFUSED_OPTIONS: Final = {
    "kafka.ssl.keystore.key": "Spark would show the key in plans; give kafka.ssl.keystore.location",
    "kafka.ssl.keystore.certificate.chain": "give kafka.ssl.keystore.location, a file in PEM",
    "kafka.ssl.truststore.password": "files in PEM have none; convert a store of Java to PEM",
    "kafka.ssl.keystore.password": "files in PEM have none; convert a store of Java to PEM",
}
"""Options of Kafka's clients that are refused, with the reason."""

_TOKEN: Final = "tokenauth"  # noqa: S105  # the name of an option
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MODULES: Final = {
    "plain.PlainLoginModule": (PLAIN,),
    "scram.ScramLoginModule": tuple(name for name in SASL_MECHANISMS if name != PLAIN),
}
_MODULE_PACKAGE: Final = "org.apache.kafka.common.security."
_JAAS_CHARACTERS_MAX: Final = 200_000
_JAAS_VALUE: Final = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[^\s"\';=]+'
_JAAS_LINE: Final = re.compile(
    rf"\s*(?P<module>[\w.]+)\s+(?:required|requisite|sufficient|optional)"
    rf"(?P<options>(?:\s+[\w.]+\s*=\s*(?:{_JAAS_VALUE}))*)\s*;\s*",
    re.DOTALL | re.IGNORECASE,
)
_JAAS_OPTION: Final = re.compile(rf"\s+(?P<name>[\w.]+)\s*=\s*(?P<value>{_JAAS_VALUE})", re.DOTALL)


def parse_security(text: Callable[[str], str | None], bootstrap_servers: str) -> SecuritySettings:
    """Return the settings in the options of a reader or writer, whose values `text` returns by name (None: not given).
    Raises `ConfigError`."""
    own = {setting: text(name) for name, setting in OWN_OPTIONS.items() if text(name) is not None}
    kafka = [name for name in KAFKA_OPTIONS if text(name) is not None]
    if not kafka:
        tls = own.get("tls")
        given = {
            **own,
            "tls": None if tls is None else parse_tls(tls),
            "delegation_token": _flag(own.get("delegation_token")),
        }
        return resolve_security(bootstrap_servers, given)
    if own:
        raise ConfigError(f"option {kafka[0]} cannot be used with those of Mansio's own: give one kind")
    return _parse_kafka_options(text, kafka)


def _parse_kafka_options(text: Callable[[str], str | None], given: list[str]) -> SecuritySettings:
    protocol = (text(_PROTOCOL) or "").strip().upper()
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"option {given[0]} needs option {_PROTOCOL}: {', '.join(_PROTOCOLS)}")
    is_tls, is_sasl = protocol.endswith("SSL"), protocol.startswith("SASL")
    for name in given:
        needed = "SSL" if name.startswith("kafka.ssl.") else "SASL" if name.startswith("kafka.sasl.") else ""
        if (needed == "SSL" and not is_tls) or (needed == "SASL" and not is_sasl):
            raise ConfigError(f"option {name} has no effect with {_PROTOCOL}={protocol}: leave it out")
    user, password, mechanism, is_token = _user(text) if is_sasl else ("", "", "", False)
    for kind, files in ((_TRUST_TYPE, (_TRUST_FILE, _TRUST_TEXT)), (_KEY_TYPE, (_KEY_FILE,))):
        named = [name for name in files if text(name) is not None]
        if named and (text(kind) or "JKS").strip().upper() != "PEM":
            raise ConfigError(f"option {named[0]} needs option {kind}=PEM, and a file in PEM")
    algorithm = text(_CHECKS_NAME)
    if algorithm is not None and algorithm.strip().lower() not in ("", "https"):
        raise ConfigError(f"option {_CHECKS_NAME} is https, or empty")
    return SecuritySettings(
        tls=(text(_TRUST_FILE) or True) if is_tls else False,
        user=user,
        password=password,
        mechanism=mechanism,
        delegation_token=is_token,
        certificate=text(_KEY_FILE) or "",
        key_password=text(_KEY_PASSWORD) or "",
        authorities=text(_TRUST_TEXT) or "",
        checks_name=algorithm is None or bool(algorithm.strip()),
    )


def _flag(text: str | None) -> bool | None:
    if text is None:
        return None
    if text.strip().lower() not in ("true", "false"):
        raise ConfigError(
            "option delegationToken is true or false; the secret of a token is the option password"
        )
    return text.strip().lower() == "true"


def _user(text: Callable[[str], str | None]) -> tuple[str, str, str, bool]:
    """Return user, password, mechanism, and whether they are those of a delegation token."""
    mechanism = (text(_MECHANISM) or "").strip()
    if mechanism not in SASL_MECHANISMS:
        raise ConfigError(f"option {_MECHANISM} is one of {', '.join(SASL_MECHANISMS)}")
    user, password, allowed, is_token = parse_jaas_config(text(_JAAS) or "")
    if mechanism not in allowed:
        raise ConfigError(f"option {_JAAS} names the login module of another mechanism than {mechanism}")
    return user, password, mechanism, is_token


def parse_jaas_config(line: str) -> tuple[str, str, tuple[str, ...], bool]:
    """Return user, password, the mechanisms of the login module, and whether it logs in with a delegation token, in a
    line of JAAS:

    org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p";

    Raises `ConfigError`, without the line.
    """
    found = _JAAS_LINE.fullmatch(line) if len(line) <= _JAAS_CHARACTERS_MAX else None
    if found is None:
        raise ConfigError(
            f'option {_JAAS} is not "MODULE required username=... password=...;", with the semicolon'
        )
    allowed = next(
        (names for module, names in _MODULES.items() if found["module"].endswith(_MODULE_PACKAGE + module)),
        None,
    )
    if allowed is None:
        raise ConfigError(f"option {_JAAS} names a login module other than {' and '.join(_MODULES)}")
    options = {one["name"]: _unquoted(one["value"]) for one in _JAAS_OPTION.finditer(found["options"])}
    unknown = options.keys() - {"username", "password", *(() if PLAIN in allowed else (_TOKEN,))}
    if unknown:
        raise ConfigError(f"option {_JAAS} has the unsupported {min(unknown)}")
    if not options.get("username") or not options.get("password"):
        raise ConfigError(f"option {_JAAS} has no username or no password")
    is_token = options.get(_TOKEN, "").lower() == "true"
    return options["username"], options["password"], allowed, is_token


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL) if value[0] in "\"'" else value
