"""Checks of the documents: `python -m tools.document_checks`. Each problem is one line; exit status 1 if there is any.

* names of pages and folders below `docs/` are in lower case, and pages are in one of the parts of the site;
* a link leads to a file that exists, and its anchor to a heading, as GitHub and the site name it;
* a path in code font exists;
* every page but a decision is in the navigation of `zensical.toml`, once, and every page is within three clicks of
  `docs/index.md` without it;
* lists and tables are written so that GitHub and Python-Markdown, which the site uses, show the same.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tutorial", "how-to", "reference", "internals", "adr")
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DECISIONS = "adr/index.md"
CLICKS_MAX = 3

FOLDERS = ("", "src", "src/mansio", "tests", "docs")
"""Folders to which paths in documents are relative, besides that of the document."""

CODE_BLOCK = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.*?)#* *$", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?P<path>[^)#:\s]*)(?P<anchor>#[^)\s]*)?\)")
PATH = re.compile(r"`([\w.*-]+/[\w./*-]*\.(?:py|md|sh|yaml|toml|proto|txt)|[\w.*-]+/[\w./*-]*/)`")
PLACEHOLDER = re.compile(r"[A-Z]{3,}")
LIST_ITEM = re.compile(r"( *)(?:[*+-]|\d+\.) ")
PAGE_NAME = re.compile(r"[a-z0-9-]+\.md")


def pages(root: Path) -> list[Path]:
    """Return the documents at the top and all pages below `docs/`."""
    return [*(root / name for name in TOP), *sorted((root / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """Return a document without its code blocks, with the same lines."""
    return CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the headings of a page."""
    found: Counter[str] = Counter()
    names = set()
    for heading in HEADING.findall(prose(page.read_text(encoding="utf-8"))):
        words = LINK.sub(lambda link: link["text"], heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        names.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return frozenset(names)


def bad_links(page: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """Links to files or headings that do not exist, and paths in code font that do not."""
    for path in PATH.findall(text):
        folders = (page.parent, *(root / name for name in FOLDERS))
        if not PLACEHOLDER.search(path) and not any(next(folder.glob(path), None) for folder in folders):
            yield f"{path} does not exist"
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "", text)):
        target = page.parent / link["path"] if link["path"] else page
        if not target.exists():
            yield f"the link to {link['path']} leads to no file"
        elif link["anchor"] and target.suffix == ".md" and link["anchor"][1:] not in anchors(target):
            yield f"the link to {link['path']}{link['anchor']} leads to no heading"


def bad_layout(text: str) -> Iterator[str]:
    """Lists and tables that Python-Markdown shows as part of the paragraph before them."""
    previous, is_list = "", False
    for number, line in enumerate(text.splitlines(), 1):
        item = LIST_ITEM.match(line)
        is_table = line.startswith("|")
        if item and not item[1] and previous.strip() and not is_list:
            yield f"line {number}: a list needs an empty line before it"
        if item and item[1] and is_list and len(item[1]) % 4:
            yield f"line {number}: a nested list is indented by four spaces"
        if is_table and previous.strip() and not previous.startswith("|"):
            yield f"line {number}: a table needs an empty line before it"
        if item and (not item[1] or is_list):
            is_list = True
        elif line.strip() and not line.startswith(" ") and not previous.strip():
            is_list = False
        elif line.strip() and is_list and not previous.strip() and not line.startswith("    "):
            yield f"line {number}: a paragraph of a list item is indented by four spaces"
        previous = line


def bad_names(root: Path) -> Iterator[str]:
    """Pages that are in no part of the site, or have capitals in their names."""
    for page in sorted((root / "docs").rglob("*")):
        name = page.relative_to(root).as_posix()
        if page.is_file() and page.suffix == ".md" and not PAGE_NAME.fullmatch(page.name):
            yield f"{name}: the name of a page has lower-case letters, digits and hyphens"
        if page.relative_to(root / "docs").parts[0] not in {*PARTS, "index.md", "assets"}:
            yield f"{name}: pages are in docs/index.md or in docs/ {', '.join(PARTS)}"


def navigation(root: Path) -> list[str]:
    """Return the pages in the navigation of the site, relative to `docs/`, in their order."""

    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for each in node.values() if isinstance(node, dict) else node:
                yield from leaves(each)

    return list(leaves(tomllib.loads((root / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


def site_pages(root: Path) -> dict[str, Path]:
    """Address of each page of the site -> its document. Four documents at the top are pages of it, too."""
    docs = root / "docs"
    found = {page.relative_to(docs).as_posix(): page for page in sorted(docs.rglob("*.md"))}
    return found | {f"internals/{name.lower()}": root / name for name in TOP[1:]}


def unreachable(root: Path) -> Iterator[str]:
    """Pages that are not in the navigation, or too many clicks away."""
    addresses = site_pages(root)
    listed = Counter(navigation(root))
    yield from (f"zensical.toml: {page} does not exist" for page in listed if page not in addresses)
    yield from (
        f"zensical.toml: {page} is listed {times} times" for page, times in listed.items() if times > 1
    )
    yield from (
        f"zensical.toml: {page} is not in the navigation"
        for page in addresses
        if page not in listed and (not page.startswith("adr/") or page == DECISIONS)
    )
    names = {document: address for address, document in addresses.items()}
    reached = last = {root / "docs/index.md"}
    for _ in range(CLICKS_MAX):
        last = {
            target
            for page in last
            for link in LINK.finditer(prose(page.read_text(encoding="utf-8")))
            if (target := Path(os.path.normpath(page.parent / link["path"]))) in names
        } - reached
        reached = reached | last
    yield from (
        f"{address} is more than {CLICKS_MAX} clicks from index.md"
        for document, address in names.items()
        if document not in reached
    )


def problems(root: Path = ROOT) -> Iterator[str]:
    """Return a line for each problem of the documents below `root`."""
    for page in pages(root):
        text = prose(page.read_text(encoding="utf-8"))
        name = page.relative_to(root)
        yield from (f"{name}: {problem}" for problem in (*bad_links(page, text, root), *bad_layout(text)))
    yield from bad_names(root)
    yield from unreachable(root)


def main() -> None:
    found = list(problems())
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
