"""The exporter's page: what it shows, that nothing becomes markup, and what its policy admits."""

from __future__ import annotations

import base64
import hashlib
import re
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.daemon import BOUND_S
from tests.fakes.page_scene import GPU0, GPU1, Scene
from tests.fakes.stub_daemon import cache, status
from weightcached.exporter import history
from weightcached.exporter.health import View
from weightcached.exporter.history import Fault, History
from weightcached.exporter.page import HEADERS, page_of
from weightcached.wire.messages import StatusReply

VOID = {"meta", "link"}


class Parsed(HTMLParser):
    """A page as a browser's parser splits it; refuses what is not nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.raw: dict[str, str] = {}
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside in ("style", "script"):
            self.raw[inside] = self.raw.get(inside, "") + data
            return
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += f"{data}|"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def row(self, first: str, number: int = 0) -> list[str]:
        """The cells of a row that begins with `first`."""
        return [row for row in self.cells if row[0] == f"{first}|"][number]


@pytest.fixture
def scene() -> Iterator[Scene]:
    # In a path that leaves room for the sockets' names.
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as directory:
        yield Scene(Path(directory))


@pytest.fixture
def parsed(scene: Scene) -> Parsed:
    with scene.running():
        return Parsed(page_of(scene.node))


def test_caches_stand_with_state_size_engines_and_what_happened(parsed: Parsed) -> None:
    assert parsed.row("llama-8b/target") == [
        "llama-8b/target|", "ready|", "3|", "15.0 GiB|",
        "2, 1 parked|pid 48211, 3 h|pid 48377 parked, 2 h|", "restored in 2.1 s, snapshot written|",
    ]  # fmt: skip
    assert parsed.row("llama-8b/target", 1) == [
        "llama-8b/target|", "old|", "2|", "15.0 GiB|", "1|pid 31007, 25 h|", "freed when its engines end|",
    ]  # fmt: skip
    assert parsed.row("mixtral-8x7b/target")[1:] == [
        "loading|", "–|", "–|", "0|", "read weights, 31.0 of 87.0 GiB, 21 s left|",
    ]  # fmt: skip
    assert parsed.row("mistral-7b/target")[1:] == [
        "evicted|", "–|", "–|", "0|", "comes back when an engine asks for it, snapshot written|",
    ]  # fmt: skip
    assert ", budget 64.0 GiB" in parsed.text
    assert re.fullmatch(
        r"/srv/models/gemma-9b: no such directory; mount it, or correct model: in the manifest; "
        r"tried again in 6\d s\|",
        parsed.row("gemma-9b/target")[-1],
    )
    assert (
        "attaches 41 (0.124 s on average, 38 without a load), evictions 3, "
        "restores 3 (1.8 s on average), mismatches 2 (dtype 2)"
    ) in parsed.text
    assert "loads from disk 1 (no-room 1), adoptions 3" in parsed.text


def test_label_and_rollback_of_the_served_weights_are_shown(scene: Scene) -> None:
    rolled = cache(
        "tiny/target", engines=[], label="v7", live=True, rolled_back_at=time.time() - 600
    )
    scene.replies["cpu0"] = status("cpu0", rolled)
    with scene.running():
        parsed = Parsed(page_of(scene.node))
    assert parsed.row("tiny/target")[5] == "'v7', loaded in 12 s, rolled back 10 min ago, live|"


def test_style_and_script_are_in_the_package() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["weightcached.exporter"]
    others = [p for p in (root / "weightcached/exporter").glob("*.*") if p.suffix != ".py"]
    assert len(others) == 2
    assert all(any(p.match(pattern) for pattern in patterns) for p in others)


def test_bar_divides_the_devices_memory(parsed: Parsed) -> None:
    assert (
        "caches 44.5 GiB old generations 15.0 GiB other 74.9 GiB free 6.0 GiB of 140.4 GiB"
        in parsed.text
    )
    assert f"{GPU0} NVIDIA H200 ready" in parsed.text
    widths = [
        float(value.rstrip("%"))
        for tag, name, value in parsed.attributes
        if (tag, name) == ("rect", "width")
    ]
    # llama, qwen, its draft, the old generation, the rest; then the other GPU's.
    assert widths[:6] == [10.68, 19.94, 1.07, 10.68, 53.35, 49.43]


def test_engine_services_stand_with_their_engines_and_takeovers(parsed: Parsed) -> None:
    chat = parsed.row("chat")
    assert chat[1:5] == [
        "serving|", "127.0.0.1:8000|",
        "4 serving| pid 48211, 3 h, 7 requests|5 parked| pid 48377, 2 h|", "2|last in 0.76 s|",
    ]  # fmt: skip
    assert chat[5].startswith("model llama-8b, used ")
    assert parsed.row("code")[5].endswith(
        "|the last start failed: Free memory on device (6.0/140.4 GiB) is less than desired|"
    )


def test_head_counts(parsed: Parsed) -> None:
    assert (
        "not healthy 3 of 3 daemons answer, 3 caches ready, 2 wanted and not ready, "
        "1 of 2 engine services serve" in parsed.text
    )
    assert "3 ready, 2 not: weightcached on gpu-node-1" in parsed.texts


def test_last_errors_are_those_that_are_there_and_those_that_were(parsed: Parsed) -> None:
    assert parsed.row(f"{GPU1} gemma-9b/target")[2] == "now, for 14 min|"
    assert parsed.row("engine chat") == [
        "engine chat|", "a parked engine took over after 0.76 s (takeover 2)|", "3 h ago|",
    ]  # fmt: skip


def test_node_without_a_manifest_and_a_daemon_says_what_to_do(scene: Scene) -> None:
    scene.manifest.unlink()
    parsed = Parsed(page_of(scene.node))
    assert "not healthy 0 of 0 daemons answer, 0 caches ready" in parsed.text
    assert "weightcachectl start DEVICE" in parsed.text
    assert parsed.row("manifest")[1].startswith("no model manifest at ")


def test_daemon_that_is_gone_stands_with_the_command_that_starts_it(scene: Scene) -> None:
    with scene.running():
        (scene.runtime / f"{GPU1}.sock").unlink()
        parsed = Parsed(page_of(scene.node))
        (scene.runtime / f"{GPU1}.sock").touch()
    assert f"{GPU1} NVIDIA H200 no answer" in parsed.text
    assert f"systemctl --user start weightcached@{GPU1}.service" in parsed.text


def test_daemon_that_no_manifest_names_is_shown(scene: Scene) -> None:
    scene.manifest.write_text("version: 1\nmodels: []\n")
    with scene.running():
        assert "llama-8b/target" in page_of(scene.node)


def test_cache_that_the_daemon_does_not_know_is_an_error(scene: Scene) -> None:
    scene.replies["cpu0"] = status("cpu0")
    with scene.running():
        parsed = Parsed(page_of(scene.node))
    assert (
        parsed.row("cpu0 tiny/target")[1]
        == "the daemon does not know it: weightcachectl reload|"
    )  # fmt: skip


def test_release_that_somebody_asked_for_is_no_error(scene: Scene) -> None:
    released = cache(
        "tiny/target", state="released", generation=0, bytes=0, error="dropped", engines=[]
    )
    scene.replies["cpu0"] = status("cpu0", released)
    with scene.running():
        page_of(scene.node)
    assert not [s for s in scene.node.history.newest_first() if s.fault.where == "cpu0 tiny/target"]


def test_restart_of_a_daemon_and_takeover_are_kept(scene: Scene) -> None:
    scene.replies["cpu0"] = status("cpu0", cache("tiny/target", engines=[]), pid=5)
    with scene.running():
        page_of(scene.node)
        scene.replies["cpu0"] = status("cpu0", cache("tiny/target", engines=[]), pid=6)
        scene.services["chat"] |= {"takeovers": 3, "last_takeover_s": 0.5}
        parsed = Parsed(page_of(scene.node))
    assert parsed.row("cpu0")[1] == "the daemon restarted: pid 6 follows pid 5|"
    assert parsed.row("engine chat")[1] == "a parked engine took over after 0.50 s (takeover 3)|"


# ---- escaping


HOSTILE = "<script>top.hacked=1</script><img src=x onerror=top.hacked=1>'\"&lt;</td></style>]]>"


def texts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every text in a document of dictionaries and lists: what holds it, and its place there."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for place, each in list(places):
        if isinstance(each, str):
            yield value, place
        elif isinstance(each, dict | list):
            yield from texts_of(each)


def hostile(reply: StatusReply) -> StatusReply:
    """The same with every text replaced that is not a fixed word of the protocol."""
    document = msgspec.to_builtins(reply)
    for entry in document["caches"]:
        # A phase and an error are shown wherever they are; a label, if the pid cannot be seen.
        entry.update(dict.fromkeys(("phase", "error", "warning", "snapshot"), HOSTILE))
        for engine in entry["engines"]:
            engine["pid"] = 0
    document["manifest_error"] = HOSTILE
    for name in ("mismatches", "refusals", "fallbacks"):
        document["counters"] = document["counters"] or {}
        document["counters"][name] = {HOSTILE: 1}
    for holder, place in texts_of(document):
        before, holder[place] = holder[place], HOSTILE
        try:
            msgspec.convert(document, StatusReply)
        except msgspec.ValidationError:
            holder[place] = before
    return msgspec.convert(document, StatusReply)


@pytest.fixture
def hostile_scene(scene: Scene) -> Scene:
    for device, reply in scene.replies.items():
        scene.replies[device] = hostile(reply)
    for service in scene.services.values():
        for holder, place in texts_of(service):
            holder[place] = HOSTILE
    return scene


def test_no_name_and_no_text_becomes_markup(hostile_scene: Scene, scene: Scene) -> None:
    with hostile_scene.running():
        sent = page_of(hostile_scene.node)
    parsed = Parsed(sent)
    assert parsed.tags.count("script") == parsed.tags.count("style") == 1
    assert "img" not in parsed.tags
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    # Each of them is there, as text: names, errors, warnings, labels, states, counters, addresses.
    assert parsed.text.count(HOSTILE) > 40
    assert HOSTILE not in sent


def test_name_with_bytes_that_are_no_text_does_not_end_the_answer(scene: Scene) -> None:
    """A path from a file system may have such bytes, as surrogates."""
    scene.node.history.note([Fault("manifest", "/srv/\udcff: no such file")], time.time())
    with scene.served() as port, get(port) as answer:
        assert "/srv/?: no such file" in answer.read().decode()


# ---- over HTTP


def get(port: int, path: str = "/") -> Any:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=BOUND_S)


def directives(answer: Any) -> dict[str, str]:
    policy = answer.headers["Content-Security-Policy"]
    return dict(part.strip().split(" ", 1) for part in policy.split(";"))


def test_policy_admits_the_pages_own_style_and_script_and_nothing_else(scene: Scene) -> None:
    with scene.served() as port, get(port) as answer:
        parsed = Parsed(answer.read().decode())
        admitted = directives(answer)
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert admitted.pop("default-src") == "'none'"
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(parsed.raw[tag].encode()).digest()).decode()
        assert admitted.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert admitted == {
        "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'",
    }  # fmt: skip
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_page_names_nothing_outside_of_it(parsed: Parsed) -> None:
    loads = [(n, v) for _, n, v in parsed.attributes if n in ("src", "href", "style", "action")]
    assert loads == [("href", "data:,")]
    assert "url(" not in parsed.raw["style"]
    assert "@import" not in parsed.raw["style"]
    assert not re.search(r"https?:", parsed.raw["style"] + parsed.raw["script"])


def test_many_who_look_at_once_cost_the_daemons_no_more_than_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcached.exporter.server._PAGE_AGE_S", 3600.0)
    asked: list[View] = []
    look = scene.node.look

    def counted() -> View:
        asked.append(look())
        return asked[-1]

    monkeypatch.setattr(scene.node, "look", counted)
    with scene.served() as port:
        for _ in range(5):
            with get(port) as answer:
                assert answer.status == 200
    assert len(asked) == 1


def test_page_changes_nothing_and_takes_get_alone(scene: Scene) -> None:
    with scene.served() as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=b"x=1", method="POST")
        with pytest.raises(urllib.error.HTTPError) as e:
            urllib.request.urlopen(request, timeout=BOUND_S)
        with e.value:
            assert e.value.code == 501


# ---- the history


@pytest.fixture
def kept() -> History:
    return History()


def test_history_keeps_when_a_fault_was_first_and_last_seen(kept: History) -> None:
    kept.note([Fault("a", "x"), Fault("b", "y\n  z")], 1.0)
    kept.note([Fault("a", "x")], 3.0)
    assert kept.newest_first() == [
        (Fault("a", "x"), 1.0, 3.0),
        (Fault("b", "y z"), 1.0, 1.0),
    ]


def test_history_forgets_what_was_seen_least_recently(kept: History) -> None:
    for number in range(history.KEPT):
        kept.note([Fault("a", str(number))], float(number))
    kept.note([Fault("a", "0"), Fault("a", "new")], 100.0)
    texts = [seen.fault.text for seen in kept.newest_first()]
    assert texts[:2] == ["new", "0"]
    assert len(texts) == history.KEPT
    assert "1" not in texts
