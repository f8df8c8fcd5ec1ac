"""Addresses of Spark masters and Spark Connect servers, and the kind and the settings of a session."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER_PORT: Final = 7077
CONNECT_PORT: Final = 15_002
CONNECT_TIMEOUT_S: Final = 5.0


class MasterUnreachable(MansioError):
    """No Spark master or Spark Connect server accepts connections at the given address."""


def is_local_master(master: str) -> bool:
    """Whether this master runs the tasks in the driver's process."""
    return master == "local" or master.startswith("local[")


def require_reachable(url: str) -> None:
    """Raise `MasterUnreachable` if nothing accepts connections at a `spark://` or `sc://` address. Other addresses are
    not examined. Spark itself reports this after a minute, with a stack trace.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("spark", "sc"):
        return
    default_port = MASTER_PORT if scheme == "spark" else CONNECT_PORT
    reasons = []
    for address in rest.partition("/")[0].split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
        try:
            number = int(port or default_port)
            socket.create_connection((host.strip("[]"), number), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reasons.append(f"{address} ({error.strerror or error})")
        except ValueError:
            reasons.append(f"{address} (no port number)")
        else:
            return
    name = "Spark master" if scheme == "spark" else "Spark Connect server"
    raise MasterUnreachable(f"no {name} answers at {', '.join(reasons)}: start it, or correct the address")


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a Spark Connect session, whose driver is a server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def spark_settings(spark: SparkSession) -> dict[str, str]:
    """Return the settings of the session and of its application. Those that Spark Connect shows are both."""
    if is_connect(spark):
        return dict(spark.conf.getAll)
    return {**dict(spark.sparkContext.getConf().getAll()), **spark.conf.getAll}


def is_remote(spark: SparkSession) -> bool:
    """Whether the session uses other machines, or may use them."""
    if is_connect(spark):
        return True
    return not is_local_master(str(spark.sparkContext.master))
