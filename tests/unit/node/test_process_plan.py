"""Plan of several broker processes: what stays from start to start, and what is refused before anything is written."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.maintenance.data_dir_mode import MovedTo, check_data_dir_mode, write_moved_to
from mansio.config.settings import Origin, Settings
from mansio.config.sources import load_settings
from mansio.errors import ConfigError
from mansio.host import free_ports
from mansio.host.disk import HostDisk
from mansio.node.processes.plan import Layout, NodePlan, plan_node, read_layout, without_leaving, write_layout

if TYPE_CHECKING:
    from pathlib import Path

DISK = HostDisk()


def planned(directory: Path, count: int, **settings: Any) -> NodePlan:
    return plan_node(DISK, Settings(data_dir=str(directory), **settings), count)


def changes(plan: NodePlan, name: str) -> list[str | None]:
    return [each.changes.get(name) for each in plan.processes]


def test_each_process_has_a_node_id_ports_and_a_directory_of_its_own(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        3,
        node_id=5,
        listeners="IN://127.0.0.1:9092,OUT://127.0.0.1:9192",
        listener_security_protocol_map="IN:PLAINTEXT,OUT:PLAINTEXT",
        advertised_listeners="IN://a:9092,OUT://b:29192",
        insecure_listen=True,
    )
    assert [each.node_id for each in plan.processes] == [5, 6, 7]
    assert changes(plan, "listeners")[2] == "IN://127.0.0.1:9094,OUT://127.0.0.1:9194"
    assert changes(plan, "advertised_listeners")[1] == "IN://a:9093,OUT://b:29193"
    assert [each.directory for each in plan.processes] == [f"{tmp_path}/{number}" for number in range(3)]
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_processes_share_ports_and_the_label_of_their_host(tmp_path: Path) -> None:
    plan = planned(tmp_path, 2, http_listener="127.0.0.1:0", sqs_listener="127.0.0.1:9324")
    assert len(set(changes(plan, "http_listener"))) == 1
    assert not str(changes(plan, "http_listener")[0]).endswith(":0")
    assert changes(plan, "sqs_listener") == [None, None], "that of the supervisor"
    assert changes(plan, "share_ports") == ["true", "true"]
    assert changes(plan, "broker_host_label") == [socket.gethostname()] * 2
    assert changes(plan, "default_replication_factor") == ["1", "1"]
    assert plan.member is not None
    assert changes(plan, "etcd_endpoints") == [plan.member.client_url] * 2


def test_of_a_named_etcd_no_member_runs_and_the_replication_factor_stays(tmp_path: Path) -> None:
    plan = planned(tmp_path, 2, etcd_endpoints="http://10.0.0.1:2379", broker_host_label="m")
    assert plan.member is None
    assert changes(plan, "etcd_endpoints") == ["http://10.0.0.1:2379"] * 2
    assert changes(plan, "default_replication_factor") == [None, None]
    assert changes(plan, "broker_host_label") == ["m", "m"]


def test_a_later_start_has_the_same_layout_and_more_or_fewer_processes(tmp_path: Path) -> None:
    first = planned(tmp_path, 2, node_id=4)
    write_layout(DISK, str(tmp_path), first.layout)
    assert read_layout(DISK, str(tmp_path)) == first.layout
    again = planned(tmp_path, 4)
    assert again.layout.member_ports == first.layout.member_ports
    assert [each.node_id for each in again.processes] == [4, 5, 6, 7]
    write_layout(DISK, str(tmp_path), again.layout)
    fewer = planned(tmp_path, 1)
    assert fewer.leaving == (5, 6, 7)
    assert without_leaving(fewer).directories == ("0",)
    with pytest.raises(ConfigError, match=r"node_id: the brokers in .* have ids from 4 on"):
        planned(tmp_path, 2, node_id=7)
    with pytest.raises(ConfigError, match="belongs to several broker processes"):
        check_data_dir_mode(DISK, str(tmp_path), clustered=False)


def test_the_directory_of_one_broker_of_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text("{}")
    with pytest.raises(ConfigError, match="one broker of a cluster"):
        planned(tmp_path, 2)


def test_the_directory_of_a_single_node_is_that_of_the_first_process(tmp_path: Path) -> None:
    (tmp_path / "metadata.sqlite3").write_bytes(b"")
    first = planned(tmp_path, 2)
    assert first.imports
    assert [each.directory for each in first.processes] == [str(tmp_path), f"{tmp_path}/1"]
    write_layout(DISK, str(tmp_path), first.layout)
    check_data_dir_mode(DISK, str(tmp_path), clustered=False)  # it is not moved yet
    with pytest.raises(ConfigError, match="cannot join a cluster"):
        check_data_dir_mode(DISK, str(tmp_path), clustered=True)
    write_moved_to(DISK, str(tmp_path), MovedTo("c1", 1))
    again = planned(tmp_path, 2)
    assert not again.imports, "there is no second import"
    assert again.processes[0].directory == str(tmp_path)
    check_data_dir_mode(DISK, str(tmp_path), clustered=True)
    with pytest.raises(ConfigError, match="was moved to the cluster c1"):
        check_data_dir_mode(DISK, str(tmp_path), clustered=False)
    (tmp_path / "processes.json").unlink()
    with pytest.raises(ConfigError, match=r"moved to the cluster c1, and processes\.json is missing"):
        planned(tmp_path, 2)


def test_metadata_in_a_named_etcd_is_not_looked_for_in_a_new_member(tmp_path: Path) -> None:
    named = planned(tmp_path, 2, etcd_endpoints="http://10.0.0.1:2379")
    write_layout(DISK, str(tmp_path), named.layout)
    with pytest.raises(ConfigError, match="name it again"):
        planned(tmp_path, 2)


def test_a_member_that_is_open_to_the_machine_is_refused_beside_listeners_that_are_not(
    tmp_path: Path,
) -> None:
    closed = {"listeners": "SASL_PLAINTEXT://127.0.0.1:9092", "open_listeners": "http"}
    with pytest.raises(ConfigError, match="name an etcd with TLS"):
        planned(tmp_path, 2, **closed)
    assert planned(tmp_path, 2, **closed, etcd_endpoints="https://e:2379").member is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {
                "listeners": "A://127.0.0.1:9092,B://127.0.0.1:9093",
                "listener_security_protocol_map": "A:PLAINTEXT,B:PLAINTEXT",
            },
            "A and B would both have port 9093",
        ),
        ({"listeners": "127.0.0.1:65535"}, "3 processes need ports from 65535"),
        ({"listeners": "127.0.0.1:9078"}, "http_listener: port 9080 is needed"),
        ({"listeners": "127.0.0.1:9081"}, "supervisor_listener: port 9081 is needed"),
        ({"supervisor_listener": "127.0.0.1:9080"}, "127.0.0.1:9080 is the address of http_listener, too"),
        (
            {"sqs_listener": "0.0.0.0:9081", "insecure_listen": True},
            "127.0.0.1:9081 is the address of sqs_listener, too",
        ),
    ],
)
def test_ports_that_two_processes_would_need_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        planned(tmp_path, 3, **settings)


def test_a_listener_at_a_port_of_the_etcd_that_the_node_has_is_refused(tmp_path: Path) -> None:
    write_layout(DISK, str(tmp_path), Layout(("0", "1"), 1, (9300, 9094)))
    assert len(planned(tmp_path, 2).processes) == 2
    with pytest.raises(
        ConfigError, match="port 9094, which 3 processes need for the listeners, is that of etcd"
    ):
        planned(tmp_path, 3)


def test_an_address_of_another_interface_is_not_that_of_the_supervisor(tmp_path: Path) -> None:
    plan = planned(tmp_path, 2, http_listener="10.0.0.1:9081", insecure_listen=True)
    assert len(plan.processes) == 2


def test_etcd_of_its_own_means_one_replica_whatever_a_file_has(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("default_replication_factor: 3\n")
    settings = load_settings(str(config), {"data_dir": str(tmp_path / "node")})
    assert settings.origin("default_replication_factor") is Origin.FILE
    assert changes(plan_node(DISK, settings, 2), "default_replication_factor") == ["1", "1"]


def test_ports_that_are_chosen_are_not_those_that_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_ports, "PORT_MIN", 23_000)
    monkeypatch.setattr(free_ports, "PORT_END", 23_100)
    monkeypatch.setattr(free_ports, "is_free", lambda _host, _port: True)
    named = {
        "listeners": "127.0.0.1:23000",
        "sqs_listener": "127.0.0.1:23095",
        "supervisor_listener": "127.0.0.1:23096",
    }
    plan = planned(tmp_path, 94, http_listener="127.0.0.1:0", **named)
    assert plan.layout.member_ports is not None
    http_port = int(str(changes(plan, "http_listener")[0]).rpartition(":")[2])
    assert {*plan.layout.member_ports, http_port} <= {23_094, 23_097, 23_098, 23_099}
    assert len({*plan.layout.member_ports, http_port}) == 3


def test_a_node_whose_etcd_was_replaced_by_a_named_one_does_not_return_to_it(tmp_path: Path) -> None:
    write_layout(DISK, str(tmp_path), planned(tmp_path, 2).layout)
    named = planned(tmp_path, 2, etcd_endpoints="http://10.0.0.1:2379")
    write_layout(DISK, str(tmp_path), named.layout)
    with pytest.raises(ConfigError, match="name it again"):
        planned(tmp_path, 2)


def test_each_process_has_an_audit_file_of_its_own(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, 2, etcd_endpoints="https://e:2379", authorizer="acl", audit_log="/var/log/audit.json"
    )
    assert changes(plan, "audit_log") == ["/var/log/audit.json.1", "/var/log/audit.json.2"]


def test_a_damaged_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text('{"directories": 7}')
    with pytest.raises(ConfigError, match="is damaged"):
        planned(tmp_path, 2)


def test_health_and_metrics_are_open_to_other_machines_only_if_that_is_stated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"supervisor_listener: .* does not authenticate"):
        planned(tmp_path, 2, supervisor_listener="10.0.0.1:9081")
    assert planned(tmp_path, 2, supervisor_listener="10.0.0.1:9081", insecure_listen=True)
