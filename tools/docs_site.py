"""The documentation site: `python -m tools.docs_site [build | serve] [--port N]`; `make docs` serves it.

Zensical builds it from a copy of the pages below `.site/`: `docs/`, and the documents at the top that are part of the
site. In the copy, links lead to pages of the site or, for other files, to the repository of `tools/owner.toml`; while
that is empty, only their text is left. The result, `.site/html`, is a folder of files for any web server; it loads
nothing from other hosts.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools import owner
from tools.document_checks import CODE_BLOCK, LINK, ROOT, site_pages

if TYPE_CHECKING:
    import re

PLACE = ROOT / ".site"
ASSETS = {".css", ".js", ".svg"}
NOT_SEARCHED = ("internals/", "adr/", "reference/api/blocking.md")
"""Pages that the search leaves out: every visitor loads its index, and these are for people who have the source, or
repeat another page."""

NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
POLL_S = 1.0


def stage(root: Path, place: Path) -> None:
    """Write the pages and the configuration of the site to `place`; a file with the same content is not touched."""
    known = owner.read()
    addresses = {document: address for address, document in site_pages(root).items()}
    addresses[root / "README.md"] = "index.md"
    written = set()
    for file in (root / "docs").rglob("*"):
        if file.suffix in ASSETS:
            _write(place / "pages" / file.relative_to(root / "docs"), file.read_text(encoding="utf-8"))
    for address, document in site_pages(root).items():
        text = _with_links_of_the_site(document, address, addresses, root, known.repository)
        if address.startswith(NOT_SEARCHED):
            text = NO_SEARCH + text
        written.add(_write(place / "pages" / address, text))
    for old in set((place / "pages").rglob("*.md")) - written:
        old.unlink()
    extra = {"site_url": known.documentation, "repo_url": known.repository}
    lines = "".join(f'{key} = "{value}"\n' for key, value in extra.items() if value)
    config = (root / "zensical.toml").read_text(encoding="utf-8")
    _write(place / "zensical.toml", config.replace("[project]\n", f"[project]\n{lines}", 1))


def _write(path: Path, text: str) -> Path:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _with_links_of_the_site(
    document: Path, address: str, addresses: dict[Path, str], root: Path, repository: str
) -> str:
    def rewritten(link: re.Match[str]) -> str:
        text, path, anchor = link["text"], link["path"], link["anchor"] or ""
        if not path:
            return link[0]
        target = Path(os.path.normpath(document.parent / path))
        if target.suffix in ASSETS:
            return link[0]
        if target in addresses:
            return f"[{text}]({os.path.relpath(addresses[target], Path(address).parent)}{anchor})"
        if repository:
            return f"[{text}]({repository}/blob/main/{target.relative_to(root).as_posix()}{anchor})"
        return text

    parts = []
    end = 0
    whole = document.read_text(encoding="utf-8")
    for block in CODE_BLOCK.finditer(whole):
        parts += [LINK.sub(rewritten, whole[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(rewritten, whole[end:])])


def build(root: Path = ROOT, place: Path = PLACE, *, is_strict: bool = True) -> Path:
    """Build the site and return its folder. A broken link is an error if `is_strict`."""
    stage(root, place)
    shutil.rmtree(place / "html", ignore_errors=True)
    command = [str(Path(sys.executable).parent / "zensical"), "build", *(["--strict"] if is_strict else [])]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr.partition("Traceback")[0])
    return place / "html"


def serve(port: int) -> None:
    """Serve the site on loopback, and build it again when a page changes."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(build()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state = _modified()
        while True:
            time.sleep(POLL_S)
            if (now := _modified()) != state:
                state = now
                build(is_strict=False)
                print("built again", flush=True)


def _modified() -> list[tuple[Path, int]]:
    watched = [*site_pages(ROOT).values(), ROOT / "zensical.toml"]
    return [(page, page.stat().st_mtime_ns) for page in watched]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", nargs="?", choices=("build", "serve"), default="serve")
    parser.add_argument("--port", type=int, default=8000, help="of the server on 127.0.0.1; 0: a free one")
    arguments = parser.parse_args()
    if arguments.action == "build":
        print(build())
    else:
        try:
            serve(arguments.port)
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
