"""Connections to etcd: accepted versions and clusters, TLS, users."""

from __future__ import annotations

import asyncio
import base64
import logging
import subprocess
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from mansio.errors import ConfigError, StorageError, Unavailable
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import EtcdDenied, EtcdUnsupported
from mansio.metadata.etcd.config import EtcdConfig
from mansio.metadata.etcd.lease import ThreadKeepAlive
from mansio.metadata.etcd.versions import VersionSupport, version_support
from mansio.metadata.metadata_store import Put
from support.etcd import Etcd, etcd_directory, etcd_store, one_etcd
from support.machine import scaled
from support.paths import free_port, required_tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from mansio.metadata.metadata_store import Event

DEADLINE_S = 30


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.5.0", VersionSupport.REFUSED),
        ("3.5.0-rc.1", VersionSupport.REFUSED),
        ("3.5.2", VersionSupport.REFUSED),
        ("3.3.27", VersionSupport.REFUSED),
        ("2.3.8", VersionSupport.REFUSED),
        ("", VersionSupport.REFUSED),
        ("latest", VersionSupport.REFUSED),
        ("3.5.3", VersionSupport.OLD),
        ("3.5.12", VersionSupport.OLD),
        ("3.4.23", VersionSupport.OLD),
        ("3.5.13", VersionSupport.GOOD),
        ("3.5.21", VersionSupport.GOOD),
        ("3.6.0", VersionSupport.GOOD),
        ("3.10.1", VersionSupport.GOOD),
        ("4.0.0", VersionSupport.GOOD),
    ],
)
def test_versions_that_lose_data_are_distinguished_from_others(
    version: str, expected: VersionSupport
) -> None:
    assert version_support(version) is expected


@asynccontextmanager
async def pretended_etcd(version: str, cluster_id: int = 1) -> AsyncIterator[str]:
    """Answers `Status` only."""

    async def status(request: rpc.StatusRequest, context: Any) -> rpc.StatusResponse:
        return rpc.StatusResponse(version=version, header=rpc.ResponseHeader(cluster_id=cluster_id))

    async with served({"Maintenance/Status": (status, rpc.StatusRequest)}) as url:
        yield url


@asynccontextmanager
async def served(methods: dict[str, tuple[Any, Any]]) -> AsyncIterator[str]:
    """A gRPC server with some of etcd's methods: `BrokerServices/Method` -> (what answers it, the request's type)."""
    server = grpc.aio.server()
    for path, (answer, request) in methods.items():
        service, method = path.split("/")
        kind = (
            grpc.stream_stream_rpc_method_handler
            if method == "Watch"
            else grpc.unary_unary_rpc_method_handler
        )
        handler = kind(answer, request.FromString, lambda message: message.SerializeToString())
        handlers = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", {method: handler})
        server.add_generic_rpc_handlers((handlers,))
    port = free_port()
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def open_and_close(*urls: str, **options: Any) -> None:
    async with etcd_store(*urls, **options):
        pass


def test_one_bad_version_among_the_endpoints_is_refused_by_name(etcd: Etcd) -> None:
    async def main() -> None:
        async with pretended_etcd("3.5.1") as url:
            with pytest.raises(EtcdUnsupported, match=r"3\.5\.1.*3\.5\.13") as raised:
                await open_and_close(etcd.url, url)
            assert url in raised.value.message

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_endpoints_of_two_etcd_clusters_are_refused(etcd: Etcd) -> None:
    """A client that moves from one to the other would read one's metadata and write it to the other."""

    async def main() -> None:
        async with pretended_etcd("3.6.1", cluster_id=99) as url:
            with pytest.raises(EtcdUnsupported, match="another etcd cluster"):
                await open_and_close(url, etcd.url)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_old_version_is_taken_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pretended_etcd("3.5.12") as old, pretended_etcd("3.5.13") as good:
            with caplog.at_level(logging.WARNING, "mansio"):
                await open_and_close(old, good)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
    assert [record.message for record in caplog.records] == ["etcd_version_old"]


@asynccontextmanager
async def etcd_without_status(*, allowed: bool, cluster_id: int = 1) -> AsyncIterator[str]:
    """As 3.6 with users: its status is for root only. `allowed`: to read under /mansio/."""

    async def status(request: rpc.StatusRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")

    async def read(request: rpc.RangeRequest, context: Any) -> rpc.RangeResponse:
        assert request.key.startswith(b"/mansio/")
        if not allowed:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return rpc.RangeResponse(header=rpc.ResponseHeader(cluster_id=cluster_id))

    methods = {"Maintenance/Status": (status, rpc.StatusRequest), "KV/Range": (read, rpc.RangeRequest)}
    async with served(methods) as url:
        yield url


def test_etcd_that_shows_its_status_to_root_only_is_used_all_the_same() -> None:
    async def main() -> None:
        async with etcd_without_status(allowed=True) as url:
            await open_and_close(url)
            async with etcd_without_status(allowed=True, cluster_id=2) as other:
                with pytest.raises(EtcdUnsupported, match="another etcd cluster"):
                    await open_and_close(url, other)
        async with etcd_without_status(allowed=False) as url:
            with pytest.raises(EtcdDenied, match="lacks a permission"):
                await open_and_close(url)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_error_without_a_responding_endpoint_names_all_endpoints() -> None:
    async def main() -> None:
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        with pytest.raises(Unavailable) as raised:
            await open_and_close(*urls)
        assert all(url in raised.value.message for url in urls)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


@pytest.mark.parametrize(
    ("endpoints", "options"),
    [
        ([], {}),
        (["etcd:2379"], {}),
        (["ftp://etcd"], {}),
        (["http://"], {}),
        (["http://etcd:notaport"], {}),
        (["http://etcd:2379/path"], {}),
        (["http://me:secret@etcd"], {}),
        (["http://a", "https://b"], {}),
        (["http://a"], {"user": "me"}),
        (["http://a"], {"ca_file": "/dev/null"}),
        (["https://a"], {"certificate_file": "/dev/null"}),
        (["https://a"], {"ca_file": "/nowhere/ca.pem"}),
    ],
)
def test_settings_that_make_no_sense_are_one_clear_line(
    endpoints: list[str], options: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        EtcdConfig.create(endpoints, **options)
    assert "\n" not in raised.value.message
    assert "secret" not in raised.value.message


def test_settings_are_completed_and_keep_the_password_to_themselves() -> None:
    config = EtcdConfig.create(
        ["http://etcd", " http://[::1]:23790/ ", "http://etcd:2379"], user="me", password="secret"
    )
    assert config.endpoints == ("http://etcd:2379", "http://[::1]:23790")
    assert "secret" not in repr(config)


# TLS


def make_certificates(home: Path) -> dict[str, str]:
    """An authority, a server and a client certificate of it, and an authority that has signed nothing."""

    def openssl(*arguments: str) -> None:
        subprocess.run([required_tool("openssl"), *arguments], cwd=home, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl(
            "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"
        )
    (home / "ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-extfile", "ext"),
        )
    return {path.name: str(path) for path in home.iterdir()}


def test_tls_both_ways_and_no_other_client(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    server = ["--cert-file", files["server.pem"], "--key-file", files["server.key"]]
    client = {"certificate_file": files["client.pem"], "key_file": files["client.key"]}

    async def main(etcd: Etcd) -> None:
        async with etcd_store(etcd.url, ca_file=files["ca.pem"], **client) as store:
            await store.transact([], [Put("/tls", b"x")])
            lease = await store.leases.grant(30)
            thread = ThreadKeepAlive(EtcdConfig.create([etcd.url], ca_file=files["ca.pem"], **client))
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == 30
            thread.close()
        for ca, proof in (("ca.pem", {}), ("other.pem", client)):
            with pytest.raises(Unavailable) as raised:
                await open_and_close(etcd.url, ca_file=files[ca], **proof)
            assert "\n" not in raised.value.message
        with pytest.raises(Unavailable):
            await open_and_close(etcd.url.replace("https", "http"))

    with etcd_directory() as directory:
        arguments = [*server, "--client-cert-auth", "--trusted-ca-file", files["ca.pem"]]
        etcd = Etcd(directory, arguments=arguments)
        etcd.scheme = "https"
        try:
            etcd.start()
            asyncio.run(asyncio.wait_for(main(etcd), scaled(DEADLINE_S)))
        finally:
            etcd.stop()


# Users


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@contextmanager
def etcd_with_users(*arguments: str) -> Iterator[Etcd]:
    """`root` may do all; `mansio` what is under /mansio/."""
    with one_etcd(arguments=arguments) as etcd:
        etcd.post("auth/user/add", name="root", password="root's")
        etcd.post("auth/role/add", name="root")
        etcd.post("auth/user/grant", user="root", role="root")
        etcd.post("auth/user/add", name="mansio", password="secret")
        etcd.post("auth/role/add", name="mansio")
        allowed = {"permType": "READWRITE", "key": encoded("/mansio/"), "range_end": encoded("/mansio0")}
        etcd.post("auth/role/grant", name="mansio", perm=allowed)
        etcd.post("auth/user/grant", user="mansio", role="mansio")
        etcd.post("auth/enable")
        yield etcd


def test_user_gets_in_and_no_further_than_allowed() -> None:
    async def main(etcd: Etcd) -> None:
        async with etcd_store(etcd.url, user="mansio", password="secret") as store:
            await store.transact([], [Put("/mansio/a", b"x")])
            assert (await store.list("/mansio/")).entries
            for call in (
                store.get("/else"),
                store.transact([], [Put("/else", b"")]),
                anext(store.watch("/else", 1)),
            ):
                with pytest.raises(EtcdDenied, match="permission denied"):
                    await call
            with pytest.raises(StorageError, match="restored"):  # what it asks to find that out, it may ask
                await anext(store.watch("/mansio/", 1_000_000))
        with pytest.raises(EtcdDenied) as raised:
            await open_and_close(etcd.url, user="mansio", password="wrong")
        assert "wrong" not in raised.value.message
        # etcd 3.6 says so at once, earlier ones when something is read.
        with pytest.raises(EtcdDenied, match="user"):
            async with etcd_store(etcd.url) as store:
                await store.get("/mansio/a")

    with etcd_with_users() as etcd:
        asyncio.run(asyncio.wait_for(main(etcd), scaled(DEADLINE_S)))


def test_token_that_ran_out_or_was_forgotten_is_renewed_unnoticed() -> None:
    """Calls and watches both: etcd forgets its tokens when it restarts, and those unused for a while."""

    async def main(etcd: Etcd) -> None:
        config = EtcdConfig.create([etcd.url], user="mansio", password="secret")
        thread = ThreadKeepAlive(config)
        async with etcd_store(etcd.url, user="mansio", password="secret") as store:
            lease = await store.leases.grant(60)
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == 60
            first = (await store.transact([], [Put("/mansio/a", b"1")])).revision
            watch: Any = store.watch("/mansio/", first)
            assert (await anext(watch))[0].value == b"1"
            token = store.client._token
            await asyncio.sleep(2.5)  # more than a token lives
            etcd.kill()
            etcd.start()
            root = etcd.post("auth/authenticate", name="root", password="root's")["token"]
            etcd.post("kv/put", root, key=encoded("/mansio/root"), value=encoded("2"))
            assert (await anext(watch))[0].value == b"2"  # before any call has renewed the token
            done = await asyncio.gather(*(store.transact([], [Put(f"/mansio/{n}", b"")]) for n in range(8)))
            assert all(each.succeeded for each in done)
            assert store.client._token != token
            seen: list[str] = []
            while len(seen) < 8:
                seen += [event.key for event in await anext(watch)]
            assert sorted(seen) == sorted(f"/mansio/{n}" for n in range(8))
            await watch.aclose()
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == 60
        thread.close()

    with etcd_with_users("--auth-token-ttl", "1") as etcd:
        asyncio.run(asyncio.wait_for(main(etcd), scaled(DEADLINE_S)))


def test_thread_fetches_a_new_token_when_its_own_is_not_known_any_more() -> None:
    """etcd 3.4 asks keep-alives for no token; later ones may."""

    async def main() -> None:
        tokens = 0

        async def authenticate(request: rpc.AuthenticateRequest, context: Any) -> rpc.AuthenticateResponse:
            nonlocal tokens
            assert (request.name, request.password) == ("me", "secret")
            tokens += 1
            return rpc.AuthenticateResponse(token=str(tokens))

        async def keep_alive(request: rpc.LeaseKeepAliveRequest, context: Any) -> rpc.LeaseKeepAliveResponse:
            if dict(context.invocation_metadata()).get("token") != "2":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")
            return rpc.LeaseKeepAliveResponse(ID=request.ID, TTL=7)

        async with served(
            {
                "Auth/Authenticate": (authenticate, rpc.AuthenticateRequest),
                "Lease/LeaseKeepAlive": (keep_alive, rpc.LeaseKeepAliveRequest),
            }
        ) as url:
            thread = ThreadKeepAlive(EtcdConfig.create([url], user="me", password="secret"))
            assert await asyncio.to_thread(thread.keep_alive_once, 1) == 7
            assert await asyncio.to_thread(thread.keep_alive_once, 1) == 7
            assert tokens == 2
            thread.close()

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_watch_that_is_denied_tries_a_new_token_before_it_gives_up() -> None:
    """Some versions of etcd say "permission denied" to a watch whose token has run out."""

    async def main(allowed: str) -> Event:
        tokens = 0

        async def authenticate(request: rpc.AuthenticateRequest, context: Any) -> rpc.AuthenticateResponse:
            nonlocal tokens
            tokens += 1
            return rpc.AuthenticateResponse(token=str(tokens))

        async def status(request: rpc.StatusRequest, context: Any) -> rpc.StatusResponse:
            return rpc.StatusResponse(version="3.5.13")

        async def watch(
            requests: AsyncIterator[rpc.WatchRequest], context: Any
        ) -> AsyncIterator[rpc.WatchResponse]:
            await anext(requests)
            if dict(context.invocation_metadata()).get("token") != allowed:
                reason = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
                yield rpc.WatchResponse(created=True, canceled=True, cancel_reason=reason)
                return
            change = rpc.Event(kv=rpc.KeyValue(key=b"/a", mod_revision=9))
            yield rpc.WatchResponse(created=True, header=rpc.ResponseHeader(revision=9))
            yield rpc.WatchResponse(events=[change])

        methods: dict[str, Any] = {
            "Auth/Authenticate": (authenticate, rpc.AuthenticateRequest),
            "Maintenance/Status": (status, rpc.StatusRequest),
            "Watch/Watch": (watch, rpc.WatchRequest),
        }
        async with served(methods) as url, etcd_store(url, user="me", password="secret") as store:
            batches: Any = store.watch("/", 9)
            async with aclosing(batches):
                (event,) = await anext(batches)
                return event

    event = asyncio.run(asyncio.wait_for(main(allowed="2"), scaled(DEADLINE_S)))
    assert (event.key, event.mod_revision) == ("/a", 9)
    with pytest.raises(EtcdDenied):
        asyncio.run(asyncio.wait_for(main(allowed="none"), scaled(DEADLINE_S)))


def test_user_for_an_etcd_without_users_is_no_obstacle(etcd: Etcd) -> None:
    """So that users can be set up on brokers first, and enabled in etcd then."""

    async def main() -> None:
        async with etcd_store(etcd.url, user="me", password="secret") as store:
            assert await store.get("/nothing") is None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
