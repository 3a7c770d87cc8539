"""The exporter's page in headless Chromium: `make page`. Without Chromium these tests fail; they do
not skip. What the page holds is tested in tests/unit/test_page.py, without a browser.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium
from tests.fakes.page_scene import GPU1, Scene
from tests.fakes.stub_daemon import cache, status
from tests.unit.test_page import HOSTILE

# Fulfilled when an expression becomes true; the page fetches itself every 5 s.
_UNTIL = "new Promise(done => setInterval(() => ({condition}) && done(true), 20))"
# The lowest contrast (WCAG 2) of a text with what is behind it: of the page, or of the element itself.
_CONTRAST = """(() => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const page = light(getComputedStyle(document.body).backgroundColor);
  let worst = [99, ""];
  for (const e of document.querySelectorAll("main *"))
    if ([...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) {
      const ink = light(getComputedStyle(e).color);
      const ratio = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
      if (ratio < worst[0]) worst = [ratio, e.textContent];
    }
  return worst;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as directory:
        yield Scene(Path(directory))


@pytest.fixture(autouse=True)
def _no_complaints(browser: Chromium) -> Iterator[None]:
    browser.complaints.clear()
    yield
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_off_and_everything_can_be_read(
    browser: Chromium, scene: Scene, width: int, dark: bool
) -> None:
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert not browser.evaluate(
            "[...document.querySelectorAll('main :not(thead *)')].filter(e => e.scrollWidth > e.clientWidth + 1"
            " && getComputedStyle(e).display !== 'inline' && e.clientWidth > 1).map(e => e.outerHTML)"
        )
        ratio, text = browser.evaluate(_CONTRAST)
        assert ratio >= 4.5, text
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 26)" if dark else "rgb(251, 251, 250)")


def test_style_applies_under_the_policy(browser: Chromium, scene: Scene) -> None:
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=1280)
        widths = browser.evaluate(
            "[...document.querySelectorAll('rect')].map(r => r.getBoundingClientRect().width)"
        )
        bar = browser.evaluate("document.querySelector('.bar').getBoundingClientRect().width")
    assert [round(100 * width / bar) for width in widths[:5]] == [11, 20, 1, 11, 53]


def test_page_follows_the_daemons_and_keeps_its_place(browser: Chromium, scene: Scene) -> None:
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=400)
        browser.evaluate("scrollTo(0, 300)")
        scene.replies["cpu0"] = status("cpu0", cache("renamed/target", engines=[]))
        condition = "document.body.innerText.includes('renamed/target')"
        assert browser.evaluate(_UNTIL.format(condition=condition))
        assert browser.evaluate("scrollY") == 300


def test_page_says_that_the_exporter_is_gone(browser: Chromium, scene: Scene) -> None:
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=400)
        assert browser.evaluate("document.getElementById('lost').hidden")
    assert browser.evaluate(_UNTIL.format(condition="!document.getElementById('lost').hidden"))
    text = browser.evaluate("document.getElementById('lost').textContent")
    assert text.startswith("The exporter does not answer. This is as of ")
    assert "weightcached on" in browser.evaluate("document.body.innerText"), "the last answer stays"
    # Chromium says that the connection was refused, which is so.
    assert all("ERR_CONNECTION_REFUSED" in each for each in browser.complaints)
    browser.complaints.clear()


def test_hostile_texts_are_shown_and_do_nothing(browser: Chromium, scene: Scene) -> None:
    reply = status(GPU1, cache("x/target", error=HOSTILE, warning=HOSTILE, phase=HOSTILE))
    scene.replies[GPU1] = reply
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=1280)
        scene.services["chat"]["error"] = HOSTILE
        condition = "document.querySelector('.services').innerText.includes('hacked')"
        assert browser.evaluate(_UNTIL.format(condition=condition)), "also by the script"
        assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert browser.evaluate("typeof top.hacked") == "undefined"


def test_foreign_script_is_refused_by_the_policy(browser: Chromium, scene: Scene) -> None:
    with scene.served() as port:
        browser.open(f"http://127.0.0.1:{port}/", width=1280)
        browser.evaluate(
            "const s = document.createElement('script'); s.textContent = 'top.hacked = 1';"
            "document.body.append(s)"
        )
        assert browser.evaluate("typeof top.hacked") == "undefined"
    assert any("Content Security Policy" in each for each in browser.complaints)
    browser.complaints.clear()
