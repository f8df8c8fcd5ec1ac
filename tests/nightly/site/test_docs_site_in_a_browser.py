"""Pages of the documentation site in Chromium: accessible (axe, WCAG 2.1 A and AA), light and dark, wide and narrow.

Needs Debian's package chromium, and the dependency group `browser`.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tools import docs_site

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

sync_api: Any = pytest.importorskip("playwright.sync_api")
axe: Any = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium")
PAGES = (
    "index.html",
    "tutorial/quickstart.html",
    "tutorial/work-queue.html",
    "how-to/connect-securely.html",
    "how-to/delays.html",
    "how-to/listeners.html",
    "how-to/pipelines.html",
    "how-to/from-kafka.html",
    "how-to/security.html",
    "reference/api/mansio.html",
    "reference/cli.html",
    "reference/comparison.html",
    "reference/configuration.html",
    "reference/delivery.html",
    "internals/architecture.html",
)
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
FLAGS = [
    "--no-sandbox",  # a container, or root, has no other
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = docs_site.build(ROOT, tmp_path_factory.mktemp("site"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_fit_the_window_and_ask_no_other_host(
    address: str, scheme: str, size: str
) -> None:
    requested: list[str] = []
    found: dict[str, Any] = {}
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        width, height = SIZES[size]
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        for name in PAGES:
            assert page.goto(f"{address}/{name}", wait_until="networkidle").ok
            result = axe.Axe().run(page, options={"runOnly": RULES}).response
            rules = [(each["id"], [node["html"] for node in each["nodes"]]) for each in result["violations"]]
            root = "document.documentElement"
            if page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"):
                rules.append(("wider than the window", []))
            if rules:
                found[name] = rules
        browser.close()
    assert found == {}
    assert [url for url in requested if not url.startswith(address)] == []
