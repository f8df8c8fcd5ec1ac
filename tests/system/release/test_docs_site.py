"""The documentation site: it is built without a warning, has every page, and needs no other host."""

from __future__ import annotations

import gzip
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools import docs_site, document_checks

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_PAGE_BYTES_MAX = 300_000
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"|<link\b[^>]*\bhref=\"([^\"]+)\"")

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("zensical", path=str(Path(sys.executable).parent)):
        pytest.skip("Zensical is not installed: make docs ARGS=build")
    return docs_site.build(ROOT, tmp_path_factory.mktemp("site"))


def loaded(page: Path) -> Iterator[str]:
    """What a browser loads with a page, without the canonical address."""
    for found in LOADED.finditer(page.read_text(encoding="utf-8")):
        if 'rel="canonical"' not in found[0]:
            yield found[1] or found[2]


def test_every_page_is_built_and_loads_from_its_own_host_only(site: Path) -> None:
    pages = [site / Path(address).with_suffix(".html") for address in document_checks.site_pages(ROOT)]
    assert [page for page in pages if not page.is_file()] == []
    addresses = {address for page in pages for address in loaded(page)}
    assert addresses
    assert [each for each in addresses if re.match(r"(?:[a-z]+:)?//", each)] == []


def test_the_first_page_is_small(site: Path) -> None:
    """With the files that it loads, each compressed as web servers send it."""
    page = site / "index.html"
    files = {page, *(site / address for address in loaded(page) if (site / address).is_file())}
    assert len(files) >= 4
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= FIRST_PAGE_BYTES_MAX


def test_a_search_finds_names_of_the_api(site: Path) -> None:
    assert "PartitionProducer" in (site / "search.json").read_text(encoding="utf-8")
