"""Clients in Java and Go over TLS, with each mechanism and with certificates: the examples of "Connect with TLS and a
password", and Kafka's own tools, against `mansio serve --secure`.

Nightly: needs a JDK and Maven, or Go.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from mansio.config.security import PLAIN, SASL_MECHANISMS
from nightly.interop.java_client import QUICK_JVM
from nightly.interop.test_admin_java import CONFIGS, TOPICS, fetch_tools
from support.documents import Example, examples
from support.machine import scaled
from support.paths import ROOT
from system.e2e.test_connect_securely import PAGE
from system.e2e.test_examples import BOOTSTRAP, Bench, started
from system.e2e.test_protected_start import CERTIFICATES, SecurityBench

if TYPE_CHECKING:
    from collections.abc import Iterator

GO_MODULE: Final = Path(__file__).parent / "go_secure"
BUILD_DEADLINE_S: Final = 600
CERTIFICATE: Final = "a certificate"
WAYS: Final = (*SASL_MECHANISMS, CERTIFICATE)
SESSION_MS: Final = 1_500
SECONDS: Final = 6
ROLES: Final = ("writer", "reader")
"""Of the user of the page, for its topic."""
TOOLS: Final = {
    "kafka-topics": TOPICS,
    "kafka-configs": CONFIGS,
    "kafka-verifiable-producer": "org.apache.kafka.tools.VerifiableProducer",
}

pytestmark = [pytest.mark.timeout(900), pytest.mark.row("A8")]


@dataclass(frozen=True, slots=True)
class GoExample:
    """How the example of a Go client is changed for another way to authenticate: pairs of patterns and texts."""

    name: str
    mechanisms: dict[str, dict[str, str]]
    without_sasl: dict[str, str]


GO_EXAMPLES: Final = {
    "franz-go": GoExample(
        "franz-go/main.go",
        {
            "SCRAM-SHA-256": {r"AsSha512Mechanism": "AsSha256Mechanism"},
            "SCRAM-SHA-512": {},
            PLAIN: {
                r"sasl/scram": "sasl/plain",
                r"scram\.Auth": "plain.Auth",
                "AsSha512Mechanism": "AsMechanism",
            },
        },
        {
            r"\t\tkgo\.SASL\(.*?\n": "",
            r"\tuser := .*?\n": "",
            r"\tpassword, err := .*?\n\t}\n": "",
            r'\t"strings"\n': "",
            r'\t"\S+/sasl/scram"\n': "",
        },
    ),
    "sarama": GoExample(
        "sarama/main.go",
        {
            "SCRAM-SHA-256": {r"SCRAMSHA512": "SCRAMSHA256", r"scram\.SHA512": "scram.SHA256"},
            "SCRAM-SHA-512": {},
            PLAIN: {r"SASLTypeSCRAMSHA512": "SASLTypePlaintext"},
        },
        {
            r"\tconfig\.Net\.SASL\.SCRAMClientGeneratorFunc = .*?\n\t}\n": "",
            r"\tconfig\.Net\.SASL\..*?\n": "",
            r"\tpassword, err := .*?\n\t}\n": "",
            r'\t"strings"\n': "",
        },
    ),
    "kafka-go": GoExample(
        "kafka-go/main.go",
        {
            "SCRAM-SHA-256": {r"scram\.SHA512": "scram.SHA256"},
            "SCRAM-SHA-512": {},
            PLAIN: {
                r"sasl/scram": "sasl/plain",
                r"user, err := scram\.Mechanism\(scram\.SHA512, (.*?), (.*?)\)\n.*?\n\t}\n": (
                    r"user := plain.Mechanism{Username: \1, Password: \2}" "\n"
                ),
            },
        },
        {
            r"\tuser, err := .*?\n\t}\n": "",
            r", SASL: user": "",
            r", SASLMechanism: user": "",
            r"\tpassword, err := .*?\n\t}\n": "",
            r'\t"strings"\n': "",
            r'\t"\S+/sasl/scram"\n': "",
        },
    ),
}


def changed(code: str, changes: dict[str, str]) -> str:
    """The code with each pattern replaced, which has to be there."""
    for pattern, text in changes.items():
        code, count = re.subn(pattern, text, code, flags=re.DOTALL)
        assert count, f"{pattern} is not in the example"
    return code


class ShortSessions(SecurityBench):
    """A broker whose clients have to authenticate again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.environment["MANSIO_CONNECTIONS_MAX_REAUTH_MS"] = str(SESSION_MS)


@pytest.fixture(scope="module")
def found() -> dict[str, Example]:
    return examples(PAGE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, found: dict[str, Example]) -> Iterator[Bench]:
    """A protected broker with the user of the page, and a listener for certificates."""
    directory = tmp_path_factory.mktemp("secure")
    with started(directory, PAGE, ShortSessions, "serve-certificates") as bench:
        for name in ("user", "certificate"):
            done(bench, found[name])
        yield bench
        assert "Traceback" not in (directory / "serve-certificates.log").read_text()


def done(bench: Bench, example: Example) -> list[str]:
    """The lines that an example printed, which has to succeed."""
    outcome = bench.run(example)
    assert outcome.code == 0, f"{example.name}:\n{outcome.output}"
    return outcome.output.splitlines()


# Java


@pytest.fixture(scope="module")
def java(bench: Bench, found: dict[str, Example]) -> Bench:
    """The bench with a directory of Kafka: the jars of its libraries, and those of its scripts that the tests run."""
    if missing := [program for program in ("java", "mvn") if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: install openjdk-17-jdk-headless (or newer) and maven")
    fetch_tools()
    home = bench.directory / "kafka"
    (home / "bin").mkdir(parents=True)
    (home / "libs").symlink_to(ROOT / ".tools" / "java")
    for name, program in TOOLS.items():
        script = home / "bin" / f"{name}.sh"
        command = shlex.join(["java", *QUICK_JVM, "-cp", f"{home}/libs/*", program])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    bench.environment["KAFKA_HOME"] = str(home)
    for name in ("java-settings", "java-certificate", "Greet.java"):
        done(bench, found[name])
    return bench


def settings_for(java: Bench, way: str) -> str:
    """The name of a file with the settings of Java's clients for this way to authenticate."""
    if way == CERTIFICATE:
        return "certificate.properties"
    text = (java.directory / "client.properties").read_text().replace("SCRAM-SHA-512", way)
    if way == PLAIN:
        text = text.replace("scram.ScramLoginModule", "plain.PlainLoginModule")
    (java.directory / f"{way}.properties").write_text(text)
    return f"{way}.properties"


@pytest.mark.parametrize("way", WAYS)
def test_the_example_in_java_writes_reads_and_administers(
    java: Bench, found: dict[str, Example], way: str
) -> None:
    code = found["java"].code.replace("client.properties", settings_for(java, way))
    if way == CERTIFICATE:
        code = code.replace(BOOTSTRAP, CERTIFICATES)
    lines = done(java, found["java"]._replace(code=code))
    assert {"from Java", "greetings"} <= set(lines), lines


def test_kafkas_tool_creates_describes_and_deletes_a_user(java: Bench, found: dict[str, Example]) -> None:
    lines = done(java, found["kafka-configs"])
    assert any("'bob'" in line and "SCRAM-SHA-512=iterations=4096" in line for line in lines), lines
    password = (java.directory / "alice.password").read_text().rstrip()
    assert password not in "".join(lines)
    text = (java.directory / "client.properties").read_text().replace('"alice"', '"bob"')
    (java.directory / "bob.properties").write_text(text)
    rights = "; ".join(
        f"MANSIO_CONTEXT=secure mansio acl add bob --role {role} --topic greetings" for role in ROLES
    )
    done(java, Example("rights", "sh", rights))
    greet = found["java"]._replace(code=found["java"].code.replace("client.properties", "bob.properties"))
    assert "from Java" in done(java, greet)
    configs = f'"$KAFKA_HOME/bin/kafka-configs.sh" --bootstrap-server {BOOTSTRAP} --command-config client.properties'
    user = "--entity-type users --entity-name bob"
    several = (
        "SCRAM-SHA-256=[iterations=8192,password=secret],SCRAM-SHA-512=[iterations=4096,password=secret]"
    )
    lines = done(java, Example("several", "sh", f"{configs} --alter {user} --add-config '{several}'"))
    (line,) = [
        each
        for each in done(java, Example("describe", "sh", f"{configs} --describe {user}"))
        if "'bob'" in each
    ]
    assert "SCRAM-SHA-256=iterations=8192" in line
    assert "SCRAM-SHA-512=iterations=4096" in line
    gone = "SCRAM-SHA-256,SCRAM-SHA-512"
    done(java, Example("delete", "sh", f"{configs} --alter {user} --delete-config '{gone}'"))
    lines = done(java, Example("all", "sh", f"{configs} --describe --entity-type users"))
    assert not any("bob" in line for line in lines), lines
    refused = java.run(greet)
    assert refused.code != 0
    assert "SaslAuthenticationException" in refused.output


@pytest.mark.parametrize("way", SASL_MECHANISMS)
def test_javas_client_authenticates_again_before_its_session_ends(java: Bench, way: str) -> None:
    """For some sessions: no record fails, and the connection is not closed by the broker."""
    before, expired = authentications(java)
    command = (
        f'"$KAFKA_HOME/bin/kafka-verifiable-producer.sh" --bootstrap-server {BOOTSTRAP} --topic greetings'
        f" --throughput 20 --max-messages {20 * SECONDS} --command-config {settings_for(java, way)}"
    )
    output = "\n".join(done(java, Example("again", "sh", command)))
    assert f'"acked":{20 * SECONDS}' in output, output
    assert "Exception" not in output
    after, expired_after = authentications(java)
    assert after - before >= SECONDS * 1000 // SESSION_MS
    assert expired_after == expired


def authentications(bench: Bench) -> tuple[float, float]:
    """How often clients have authenticated, and how often their session has expired."""
    admin = "admin", (bench.directory / "data/security/admin.password").read_text().strip()
    metrics = httpx.get(f"http://{bench.http}/metrics", auth=admin, timeout=scaled(20)).text
    expired = r'^mansio_authentications_failed_total\{reason="expired"\} (\S+)'
    ((accepted,), (failed,)) = (
        re.findall(pattern, metrics, re.MULTILINE)
        for pattern in (r"^mansio_authentications_total (\S+)", expired)
    )
    return float(accepted), float(failed)


# Go


@pytest.fixture(scope="module")
def go_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the versions of the clients, for programs in directories below it."""
    if shutil.which("go") is None:
        pytest.skip("go missing: install Go")
    directory = tmp_path_factory.mktemp("go")
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(GO_MODULE / name, directory / name)
    return directory


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("client", GO_EXAMPLES)
def test_the_example_in_go_writes_and_reads(
    bench: Bench, found: dict[str, Example], go_module: Path, client: str, way: str
) -> None:
    example = GO_EXAMPLES[client]
    code = found[example.name].code
    if way == CERTIFICATE:
        code = changed(code.replace(BOOTSTRAP, CERTIFICATES), example.without_sasl)
        trust = "\tencryption.RootCAs.AppendCertsFromPEM(authority)\n"
        own = "".join(f"\t{line}\n" for line in found["go-certificate"].code.splitlines())
        assert code.count(trust) == 1
        code = code.replace(trust, trust + own)
    else:
        code = changed(code, example.mechanisms[way])
    program = go_module / f"{client}-{WAYS.index(way)}"
    program.mkdir()
    (program / "main.go").write_text(bench.code(found[example.name]._replace(code=code)))
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    command = ["go", "build", "-mod=readonly", "-o", str(program / "greet"), f"./{program.name}"]
    subprocess.run(command, cwd=go_module, env=environment, check=True, timeout=scaled(BUILD_DEADLINE_S))
    assert done(bench, Example("greet", "sh", str(program / "greet"))) == [f"from {client}"]
