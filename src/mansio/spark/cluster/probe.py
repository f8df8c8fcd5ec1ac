"""Program that reports what a Spark worker's Python has: version, packages, reachable brokers, visible directories.

`check` sends the source of this file to the workers, because a worker may lack every package, including Mansio.

Invariants:
* It runs with Python 3.6 and newer and imports only the standard library, except the modules that it is asked about.
* A fault of the worker is a field of the report, not an exception.
"""

import base64
import importlib
import json
import os
import platform
import socket
import sys
import uuid
from typing import Any

OUTPUT_PREFIX = "mansio-probe "
"""Beginning of the output line with the report: libraries may print other lines."""
CONNECT_TIMEOUT_S = 5.0
ERROR_CHARACTERS_MAX = 300


def report(request: "dict[str, Any]") -> "dict[str, Any]":
    """Return the report, as JSON values.

    `request`: `modules` to import, `brokers` as [host, port], `directories` with `location`, and `marker` and `token`:
    name and content of the file that the driver has created in it.
    """
    sys.path[:0] = [path for path in spark_packages() if path not in sys.path]
    versions, failures = {}, {}
    for name in request["modules"]:
        try:
            versions[name] = str(getattr(importlib.import_module(name), "__version__", ""))
        except Exception as error:  # noqa: BLE001  # importing a broken package can raise anything
            failures[name] = error_text(error)
    return {
        "host": socket.gethostname(),
        "process_directory": os.getcwd(),
        "executable": sys.executable,
        "python": platform.python_version(),
        "versions": versions,
        "failures": failures,
        "unreachable": unreachable(request["brokers"]),
        "directories": [examine_directory(one) for one in request["directories"]],
    }


def spark_packages() -> "list[str]":
    """Return the packages that Spark puts first on the path of a Python worker."""
    home = os.environ.get("SPARK_HOME")
    library = os.path.join(home, "python", "lib") if home else ""
    if not os.path.isdir(library):
        return []
    return sorted(
        (os.path.join(library, name) for name in os.listdir(library) if name.endswith(".zip")), reverse=True
    )


def unreachable(brokers: "list[list[str]]") -> "dict[str, str]":
    """Return the error for each address `host:port` that accepts no connection."""
    found = {}
    for host, port in brokers:
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            found[host + ":" + port] = error_text(error)
    return found


def examine_directory(directory: "dict[str, str]") -> "dict[str, Any]":
    """Whether this process sees the driver's marker, and the file that it has written for the driver."""
    location = directory["location"]
    found = {"location": location, "sees_marker": False, "written": "", "error": ""}
    try:
        if "://" in location:
            read_remote_directory(location)
            found["sees_marker"] = True
            return found
        with open(os.path.join(location, directory["marker"])) as file:
            found["sees_marker"] = file.read() == directory["token"]
        if found["sees_marker"]:
            name = directory["marker"] + "." + uuid.uuid4().hex
            with open(os.path.join(location, name), "w") as file:
                file.write(directory["token"])
            found["written"] = name
    except FileNotFoundError:
        pass
    except Exception as error:  # noqa: BLE001  # file systems of pyarrow raise many kinds
        found["error"] = error_text(error)
    return found


def read_remote_directory(location: str) -> None:
    """Request the status of an address such as `s3://...` as tasks do. Raises any error of the file system."""
    writer = importlib.import_module("mansio.iceberg.fanout_writer")
    system, path = writer.file_system(location)
    system.get_file_info(path)


def error_text(error: BaseException) -> str:
    """Return the error in one line. The text of a failed system call has no number."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    prefix = "" if isinstance(error, (OSError, ImportError)) else type(error).__name__ + ": "
    return (prefix + " ".join(str(text).split()))[:ERROR_CHARACTERS_MAX]


def main(arguments: "list[str]") -> None:
    """Print the report for the request in the first argument (JSON in base64)."""
    print(OUTPUT_PREFIX + json.dumps(report(json.loads(base64.b64decode(arguments[0]).decode()))))


if __name__ == "__main__":
    main(sys.argv[1:])
