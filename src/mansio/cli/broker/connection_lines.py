"""Commands with which clients on the machine of a protected broker or cluster connect to it, for copy and paste.

Invariant: no command contains a password; they name the files that do.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.node.protected_start import ClientFiles

CONTEXT: Final = "secure"

_MANSIO: Final = r"""mansio context add {context} --replace -b {quoted_addresses} \
  --ca {ca} --user {user} \
  --mechanism {mechanism} --password-file {password}
mansio context use {context}
mansio cluster brokers
python3 -c 'import mansio.blocking; print(mansio.blocking.connect("{addresses}").admin.describe_cluster().brokers)'
"""
_CONFLUENT: Final = """\
python3 - <<'END'
from confluent_kafka.admin import AdminClient
settings = {{
    "bootstrap.servers": "{addresses}",
    "security.protocol": "SASL_SSL",
    "ssl.ca.location": {ca!r},
    "sasl.mechanism": "{mechanism}",
    "sasl.username": "{user}",
    "sasl.password": open({password!r}).readline().rstrip(),
}}
print(AdminClient(settings).list_topics(timeout=10).brokers)
END
"""
_KCAT: Final = """\
kcat -F {kcat} -L
"""


def connection_lines(files: ClientFiles, addresses: str) -> dict[str, str]:
    """Return the commands of each client by its name; none if the password is not in its file any more. `addresses`: of
    brokers, separated by commas."""
    if files.password is None or files.kcat is None:
        return {}
    quoted = {name: shlex.quote(text) for name, text in _paths(files).items()}
    quoted["quoted_addresses"] = shlex.quote(addresses)  # brackets of IPv6 are patterns of a shell
    known = {"context": CONTEXT, "addresses": addresses, "user": files.user, "mechanism": files.mechanism}
    return {
        "mansio": _MANSIO.format(**known, **quoted),
        "confluent-kafka": _CONFLUENT.format(**known, **_paths(files)),
        "kcat": _KCAT.format(**quoted),
    }


def _paths(files: ClientFiles) -> dict[str, str]:
    return {"ca": files.ca, "password": files.password or "", "kcat": files.kcat or ""}


def print_connection(files: ClientFiles, addresses: str, new_password: str | None) -> None:
    """Print how to connect, and a new password of the first user if standard output is a terminal."""
    if new_password is not None and sys.stdout.isatty():
        print(f"\nThe password of {files.user}, shown this once: {new_password}")
    where = f"its password in {files.password}" if files.password else "whose password is in no file here"
    print(f"\nTLS with the authority in {files.ca}; user {files.user}, {where}. To connect on this machine:")
    for client, lines in connection_lines(files, addresses).items():
        print(f"\n# {client}\n{lines}", end="")
    print(flush=True)
