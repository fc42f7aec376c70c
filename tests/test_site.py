"""The documentation as a site: built without a warning, whole without network, and in a browser."""

import functools
import inspect
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import natgrad
from integrations.chromium import Browser, found

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
in_a_browser = pytest.mark.skipif(
    found() is None, reason="chromium is not installed (Debian: chromium)"
)
SHOWN = ("frameworks.html", "gallery/spectra.html", "api/training.html")


class Page(HTMLParser):
    """What a page has (ids), what it leads to, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("href"):
            self.loads.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Below some folders, as a project's page lies below its owner's."""
    for module in ("material", "mkdocstrings"):
        reason = "the site is built with the extra docs: pip install 'natgrad[docs]'"
        pytest.importorskip(module, reason=reason)
    folder = tmp_path_factory.mktemp("www") / "owner" / "natgrad"
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_links_lead_somewhere(site, pages):
    broken = defaultdict(list)
    for file, page in pages.items():
        if file.name == "404.html":
            continue  # its links begin at the root of a server
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            there = target.exists() and (target.suffix == ".html" or not anchor)
            if not there or (anchor and target in pages and anchor not in pages[target].ids):
                broken[file.relative_to(site).as_posix()].append(link)
    assert broken == {}
    assert sum(len(page.links) for page in pages.values()) > 2000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loads = {load for page in pages.values() for load in page.loads}
    assert [load for load in loads if urlsplit(load).scheme not in ("", "data")] == []
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?https?:", sheet.read_text("utf-8")) == []


def test_the_reference_has_every_name_and_argument(site, pages):
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in natgrad.__all__:
        (link,) = set(re.findall(rf'href="([^"]+)"><code>natgrad\.{name}</code>', text))
        file, _, anchor = link.partition("#")
        assert anchor in pages[site / "api" / file].ids, name
    text = (site / "api" / "training.html").read_text(encoding="utf-8")
    own = text[text.index('id="natgrad.KFAC"') : text.index('id="natgrad.KFAC.')]
    rows = re.findall(
        r'<tr class="doc-section-item">\s*<td>\s*<code>(\w+)</code>(.*?)</tr>', own, re.S
    )
    explained = {name: re.sub(r"<[^>]+>", "", rest) for name, rest in rows}
    parameters = inspect.signature(natgrad.KFAC).parameters
    assert list(explained) == list(parameters)
    assert "required" in explained["model"]
    assert "0.95" in explained["factor_decay"]
    assert "larger is more careful" in explained["damping"]
    for method in ("health", "coverage", "attach", "step", "state_dict"):
        assert f"natgrad.KFAC.{method}" in pages[site / "api" / "training.html"].ids


def test_lists_and_blocks_are_read_as_on_github(site):
    text = (site / "troubleshooting.html").read_text(encoding="utf-8")
    assert "<li><em>cost: slow.</em>" in text
    for file in site.glob("*.html"):
        words = re.sub(r"<(pre|code)\b.*?</\1>", "", file.read_text("utf-8"), flags=re.DOTALL)
        assert "```" not in words, file.name
        assert "no-run" not in re.sub(r"<!--.*?-->", "", words, flags=re.DOTALL), file.name


def test_the_gallery_is_there_as_notebooks(site):
    notebooks = {file.stem for file in (site / "gallery").glob("*.ipynb")}
    sources = {file.stem for file in (ROOT / "docs" / "gallery").glob("*.md")} - {"index"}
    assert notebooks == sources
    assert 'href="spectra.ipynb"' in (site / "gallery" / "spectra.html").read_text("utf-8")


# In a browser.

TOO_WIDE = """
[...document.querySelectorAll(".md-content *")]
  .filter((one) => !one.closest(".md-typeset__scrollwrap, pre, .highlight, .md-search"))
  .filter((one) => one.getClientRects().length)
  .filter((one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((one) => one.tagName + " " + one.textContent.slice(0, 40))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def ground(tab, dark):
    """Its colour, once a script has chosen it by what the system asks for."""
    for _ in range(50):
        colour = tab.run("getComputedStyle(document.body).backgroundColor")
        if (colour == "rgb(255, 255, 255)") != dark:
            break
        time.sleep(0.1)
    return colour


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_and_load_nothing_from_elsewhere(site, browser, width, dark):
    for name in SHOWN:
        tab = browser.open(site / name, width, dark=dark)
        assert tab.run("document.documentElement.scrollWidth") <= width, name
        assert tab.run(TOO_WIDE) == [], name
        assert (ground(tab, dark) == "rgb(255, 255, 255)") != dark, name
        assert tab.complaints() == [], name
        assert [one for one in tab.requests() if not one.startswith(("file:", "data:"))] == []
        tab.close()


def search(tab, words):
    """Titles of what is found, as a reader types who presses a key again where nothing comes:
    on a busy machine the index may be loaded after the words were typed."""
    tab("Runtime.evaluate", expression='document.getElementById("__search").click()')
    tab.run('document.querySelector(".md-search__input").focus()')
    tab("Input.insertText", text=words)
    waiting = """new Promise((done) => {
      const typed = document.querySelector(".md-search__input");
      const look = (left) => {
        if (left % 20 == 0) typed.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
        const found = [...document.querySelectorAll(".md-search-result__item h1")];
        if (found.length || !left) done(found.map((one) => one.textContent));
        else setTimeout(look, 100, left - 1);
      };
      look(600);
    })"""
    said = tab("Runtime.evaluate", expression=waiting, awaitPromise=True, returnByValue=True)
    return said["result"]["value"]


@in_a_browser
def test_search_works_from_files(site, browser):
    tab = browser.open(site / "index.html", 1280)
    assert "Finding wrong labels" in search(tab, "wrong labels")
    assert tab.complaints() == []
    tab.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@in_a_browser
def test_search_and_pages_work_below_a_path_of_a_server(site, browser):
    serve = functools.partial(Quiet, directory=str(site.parents[1]))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/owner/natgrad/"
        tab = browser.open(base + "gallery/index.html", 1280)
        assert "Wide layers" in search(tab, "max_dim diagonal blocks")
        assert tab.complaints() == []
        assert [one for one in tab.requests() if not one.startswith((base, "data:"))] == []
        tab.close()
        server.shutdown()


# What hooks change.


def test_links_of_the_repository_become_links_of_the_site(monkeypatch):
    pytest.importorskip("mkdocs", reason="part of the extra docs: pip install 'natgrad[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    import hooks

    text = (
        "[a](../src/natgrad/tables.py) [b](scale.md#a-and-g) [c](../README.md) [d](https://x.org)"
    )
    assert hooks.relinked(text, "docs/data.md") == (
        "[a](source/src/natgrad/tables.py.md) [b](scale.md#a-and-g) [c](index.md) [d](https://x.org)"
    )
    assert hooks.relinked("[x](nowhere.py)", "ARCHITECTURE.md") == "[x](nowhere.py)"
    assert hooks.relinked("[x](docs/scale.md)", "ARCHITECTURE.md") == "[x](scale.md)"
    assert hooks.relinked("```\n[x](../README.md)\n```\n", "docs/data.md").count("README") == 1
    assert hooks.with_room_for_lists("words\n- one\n- two\n") == "words\n\n- one\n- two\n"
    linked = hooks.with_reference("`natgrad.Eigen()`, [`natgrad.KFAC`](x.md), `natgrad.x`", "a.md")
    assert linked == (
        "[`natgrad.Eigen()`](api/inverses.md#natgrad.inverses.Eigen), [`natgrad.KFAC`](x.md), "
        "`natgrad.x`"
    )
