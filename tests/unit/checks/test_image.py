"""Archives of the image tool: the same bytes for the same content, and digests of what they contain."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

from tools import image

if TYPE_CHECKING:
    from pathlib import Path

TIME_S = 1_700_000_000


def packages(path: Path, time_s: int) -> Path:
    """An archive with files as mmdebstrap extracts them."""
    files = {
        "./usr/bin/python3.11": b"program",
        "./usr/share/man/man1/x.1": b"unused",
        "./usr/share/doc/x/copyright": b"licence",
        "./usr/share/doc/x/changelog": b"unused",
        "./usr/share/ca-certificates/mozilla/a.crt": b"certificate a\n",
        "./usr/share/ca-certificates/mozilla/b.crt": b"certificate b\n",
        "./var/lib/dpkg/status": b"unused",
    }
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uname = len(content), time_s, "builder"
            archive.addfile(entry, io.BytesIO(content))
    return path


def written(folder: Path, time_s: int) -> Path:
    folder.mkdir()
    build = image.Build(folder, folder / "mansio_mq-1.0-py3-none-any.whl", TIME_S)
    layer = build._base_layer(packages(folder / "base.tar", time_s))
    config = {"architecture": "amd64", "config": {"Labels": {"org.opencontainers.image.version": "1.0"}}}
    target = folder / "image.oci.tar"
    image._write_archive(target, "mansio", config, [layer.compress()], TIME_S)
    return target


def test_two_builds_of_the_same_packages_have_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path / "one", 1).read_bytes() == written(tmp_path / "two", 2).read_bytes()


def test_an_archive_has_what_its_index_and_manifest_name(tmp_path: Path) -> None:
    with tarfile.open(written(tmp_path / "one", 1)) as archive:
        names = {entry.name: entry for entry in archive if entry.isreg()}

        def content(name: str) -> bytes:
            file = archive.extractfile(names[name])
            assert file is not None
            return file.read()

        def blob(descriptor: dict[str, object]) -> bytes:
            kind, _, digest = str(descriptor["digest"]).partition(":")
            data = content(f"blobs/{kind}/{digest}")
            assert hashlib.sha256(data).hexdigest() == digest
            assert len(data) == descriptor["size"]
            return data

        (listed,) = json.loads(content("index.json"))["manifests"]
        assert listed["annotations"] == {"org.opencontainers.image.ref.name": "mansio:1.0"}
        manifest = json.loads(blob(listed))
        config = json.loads(blob(manifest["config"]))
        (layer,) = (blob(each) for each in manifest["layers"])
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        found = {entry.name: entry for entry in files}
        certificates = files.extractfile(found["etc/ssl/certs/ca-certificates.crt"])
        assert certificates is not None
        assert certificates.read() == b"certificate a\ncertificate b\n"
    assert {"usr/bin/python3.11", "usr/share/doc/x/copyright", "data", "tmp"} <= found.keys()
    assert not [name for name in found if "changelog" in name or "/man" in name or "dpkg" in name]
    assert {entry.mtime for entry in found.values()} == {TIME_S}
    assert (found["data"].uid, found["data"].mode) == (image.USER, 0o750)
    assert len(config["rootfs"]["diff_ids"]) == 1
