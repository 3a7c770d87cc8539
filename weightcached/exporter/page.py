"""`/`: one HTML page of this node, complete as it is sent.

Every text goes into a tree, and the tree is written by the standard library, so nothing that a
daemon, a model or an engine is called can become markup. Style and script travel in the page; the
policy in its header admits these two, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from weightcached import __version__
from weightcached.errors import WeightcachedError
from weightcached.exporter.health import Node, View
from weightcached.system.cgroups import machine_memory
from weightcached.system.gpus import list_gpus
from weightcached.system.paths import is_host_device
from weightcached.system.text import bytes_text, progress_text, seconds_text
from weightcached.wire.messages import CacheStatus, Counters, EngineStatus, StatusReply

CONTENT_TYPE = "text/html; charset=utf-8"
_ASSETS = files("weightcached.exporter")
_STYLE = _ASSETS.joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = _ASSETS.joinpath("page.js").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# connect-src: the script fetches the page again. img-src: an empty icon, so that no browser asks for one.
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"style-src {_digest(_STYLE)}",
            f"script-src {_digest(_SCRIPT)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# More engines of one cache are counted, not listed.
_MAX_LISTED = 8
# Left out on a narrow screen.
_NONE = ("–", "0")
_STATE_CLASSES = {
    "healthy": "good", "ready": "good", "serving": "good",
    "loading": "busy", "starting": "busy", "taking-over": "busy", "draining": "busy",
    "not healthy": "bad", "failed": "bad", "no answer": "bad",
}  # fmt: skip


class Memory(NamedTuple):
    """A device's memory in bytes. name: of the GPU."""

    name: str
    free: int
    total: int


def page_of(node: Node) -> str:
    """The page; daemons, engine services and GPUs are asked now."""
    view = node.look()
    kept = node.history.newest_first()
    current = [seen for seen in kept if seen.last >= view.at]
    past = [seen for seen in kept if seen.last < view.at]
    page = _el("html", lang="en")
    page.append(_head(view))
    body = SubElement(page, "body")
    main = SubElement(body, "main")
    main.extend([_title(view), *_devices(view), *_services(view)])
    rows = [
        [*seen.fault, f"now, for {_ago(view.at, seen.first)}" if seen.first < view.at else "now"]
        for seen in current
    ] + [
        [*seen.fault, f"{_ago(view.at, seen.last)} ago"] for seen in past
    ]  # fmt: skip
    section = _section(main, "Last errors")
    if rows:
        section.append(_table(("where", "error", "seen"), rows, "errors"))
    else:
        section.append(_el("p", "none since this exporter runs", class_="quiet"))
    # For the script, if the exporter is gone.
    body.append(_el("p", role="status", id="lost", hidden="hidden"))
    body.append(_el("script", _SCRIPT))
    return "<!doctype html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _el(tag: str, *content: Element | str, **attributes: str) -> Element:
    """An element. `class_` and `data_x` become `class` and `data-x`."""
    made = Element(
        tag, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    )
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def _section(parent: Element, title: str, *more: Element | str) -> Element:
    section = SubElement(parent, "section")
    section.append(_el("h2", title, *more))
    return section


def _table(head: Sequence[str], rows: Sequence[Sequence[Element | str]], class_: str) -> Element:
    """On a narrow screen each row is a card, and each cell names its column."""
    table = _el("table", class_=class_)
    SubElement(table, "thead").append(_el("tr", *(_el("th", name, scope="col") for name in head)))
    body = SubElement(table, "tbody")
    for row in rows:
        made = SubElement(body, "tr")
        for name, cell in zip(head, row, strict=True):
            made.append(
                _el("td", cell, data_label=name, class_="none" if cell in _NONE else "some")
            )
    return table


def _state(word: str) -> Element:
    return _el("span", word, class_=f"state {_STATE_CLASSES.get(word, 'calm')}")


def _ago(now: float, then: float) -> str:
    return seconds_text(max(0.0, now - then))


def _lines(*lines: str, class_: str = "quiet") -> list[Element]:
    return [_el("div", line, class_=class_) for line in lines if line]


# ---- head and title


def _head(view: View) -> Element:
    ready, missing = view.health.ready, len(view.health.faults)
    return _el(
        "head",
        _el("meta", charset="utf-8"),
        _el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _el("meta", name="color-scheme", content="light dark"),
        _el("title", f"{ready} ready, {missing} not: weightcached on {socket.gethostname()}"),
        _el("link", rel="icon", href="data:,"),
        _el("style", _STYLE),
        _el("noscript", _el("meta", http_equiv="refresh", content="10")),
    )


def _title(view: View) -> Element:
    health = view.health
    silent = sum(isinstance(reply, WeightcachedError) for reply in view.replies.values())
    parts = [
        f"{len(view.replies) - silent} of {len(view.replies)} daemons answer",
        f"{health.ready} caches ready",
        f"{len(health.faults)} wanted and not ready" if health.faults else "",
    ]
    services = len(view.services.replies) + len(view.services.errors)
    if services:
        serving = sum(reply["state"] == "serving" for reply in view.services.replies)
        parts.append(f"{serving} of {services} engine services serve")
    clock = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(view.at))
    return _el(
        "header",
        _el("h1", "weightcached ", _el("span", f"on {socket.gethostname()}", class_="quiet")),
        _el("p", _state("not healthy" if health.faults else "healthy"), " " + ", ".join(filter(None, parts))),
        _el("p", f"{clock}, exporter {__version__}", class_="quiet"),
    )  # fmt: skip


# ---- devices


def _devices(view: View) -> Iterator[Element]:
    gpus = {gpu.uuid: gpu for gpu in list_gpus()}
    for device, reply in view.replies.items():
        memory = None
        if gpu := gpus.get(device):
            memory = Memory(gpu.name, gpu.free_bytes, gpu.total_bytes)
        elif is_host_device(device):
            memory = Memory("host memory", *machine_memory())
        yield _device(device, reply, memory, view.at)
    if not view.replies:
        text = (
            "No daemon has a socket, and the manifest names no device: weightcachectl start DEVICE"
        )
        yield _el("section", _el("h2", "Devices"), _el("p", text))


def _device(
    device: str, reply: StatusReply | WeightcachedError, memory: Memory | None, now: float
) -> Element:
    name = _el("span", f" {memory.name}" if memory else "", class_="quiet")
    section = Element("section")
    if isinstance(reply, WeightcachedError):
        section.append(_el("h2", device, name, " ", _state("no answer")))
        section.append(_el("p", str(reply), class_="error"))
        return section
    section.append(_el("h2", device, name, " ", _state(reply.state)))
    if memory:
        section.extend(_bar(reply, memory))
    rows = [_cache(cache, now) for cache in reply.caches]
    for old in reply.old_generations:
        engines = _engines(old.engines, now)
        label = f"'{old.label}', " if old.label else ""
        note = _el("div", f"{label}freed when its engines end", class_="quiet")
        generation, size = str(old.generation), bytes_text(old.bytes)
        rows.append([old.cache, _state("old"), generation, size, engines, note])
    if rows:
        head = ("cache", "state", "generation", "size", "engines", "detail")
        section.append(_table(head, rows, "caches"))
    budget = f", budget {bytes_text(reply.budget)}" if reply.budget else ""
    lines = [f"daemon pid {reply.pid}, up {_ago(now, reply.since)}, {reply.software}{budget}"]
    if reply.counters:
        lines.append("since then: " + (", ".join(_counts(reply.counters)) or "nothing asked"))
    section.extend(_lines(*lines))
    section.extend(_lines(reply.manifest_error, class_="error"))
    return section


def _cache(cache: CacheStatus, now: float) -> list[Element | str]:
    detail = _el("div")
    done: str = cache.source
    if cache.state == "ready" and cache.source in ("loaded", "restored"):
        done = f"{cache.source} in {seconds_text(cache.load_seconds)}"
    snapshot = f"snapshot {cache.snapshot}" if cache.snapshot else ""
    if cache.state == "evicted":
        done = "comes back when an engine asks for it"
    elif not cache.generation:
        done = ""
    back = ""
    if cache.rolled_back_at is not None:
        back = f"rolled back {_ago(now, cache.rolled_back_at)} ago"
    label = f"'{cache.label}'" if cache.label else ""
    said = ", ".join(filter(None, (label, done, back, "live" if cache.live else "", snapshot)))
    detail.extend(_lines(said))
    if cache.phase:
        progress = _el("div", progress_text(cache))
        if cache.total_bytes:
            share = min(1.0, cache.done_bytes / cache.total_bytes)
            progress.append(_el("progress", value=f"{share:.3f}", max="1"))
        detail.append(progress)
    again = ""
    if cache.retry_at is not None:
        again = f"; tried again in {seconds_text(max(0.0, cache.retry_at - now))}"
    detail.extend(_lines(cache.error + again if cache.error else "", class_="error"))
    detail.extend(_lines(cache.warning, class_="warning"))
    return [
        cache.name,
        _state(cache.state),
        str(cache.generation) if cache.generation else "–",
        bytes_text(cache.bytes) if cache.bytes else "–",
        # Engines on an older generation stand in its row.
        _engines([e for e in cache.engines if e.generation in (0, cache.generation)], now),
        detail,
    ]


def _engines(engines: Sequence[EngineStatus], now: float) -> Element | str:
    if not engines:
        return "0"
    parked = sum(engine.parked for engine in engines)
    cell = _el("div", f"{len(engines)}, {parked} parked" if parked else str(len(engines)))
    listed = [
        f"{e.name}{' parked' if e.parked else ''}, {_ago(now, e.since)}"
        for e in engines[:_MAX_LISTED]
    ]
    more = len(engines) - len(listed)
    cell.extend(_lines(*listed, f"and {more} more" if more else ""))
    return cell


def _counts(counters: Counters) -> Iterator[str]:
    attaches = sum(counters.attaches.values())
    if attaches:
        mean_s = sum(counters.attach_seconds.values()) / attaches
        hits = sum(counters.hits.values())
        yield f"attaches {attaches} ({mean_s:.3f} s on average, {hits} without a load)"
    if evictions := sum(counters.evictions.values()):
        yield f"evictions {evictions}"
    if restores := sum(counters.restores.values()):
        mean_s = sum(counters.restore_seconds.values()) / restores
        yield f"restores {restores} ({mean_s:.1f} s on average)"
    for name, counted in (
        ("mismatches", counters.mismatches),
        ("attaches without a generation", counters.refusals),
        ("loads from disk", counters.fallbacks),
    ):
        if counted:
            by = ", ".join(f"{label} {count}" for label, count in sorted(counted.items()))
            yield f"{name} {sum(counted.values())} ({by})"
    if counters.adoptions:
        yield f"adoptions {counters.adoptions}"
    if counters.digest_failures:
        yield f"digests that failed {counters.digest_failures}"


def _bar(reply: StatusReply, memory: Memory) -> list[Element]:
    """Parts of the device's memory, in order, and what they stand for."""
    caches = [(cache.name, cache.bytes) for cache in reply.caches if cache.bytes]
    old = [(f"{o.cache}, generation {o.generation}", o.bytes) for o in reply.old_generations]
    resident, kept = sum(n for _, n in caches), sum(n for _, n in old)
    # An answer that is older than the driver's must not make a part negative.
    other = max(0, memory.total - memory.free - resident - kept)
    picture = _el("svg", class_="bar", role="img", height="14", width="100%")
    at = 0.0
    for class_, parts in (("cache", caches), ("old", old), ("other", [("other", other)])):
        for name, nbytes in parts:
            share = 100 * nbytes / memory.total if memory.total else 0.0
            words = _el("title", f"{name}: {bytes_text(nbytes)}")
            box = {"x": f"{at:.2f}%", "width": f"{share:.2f}%", "height": "14"}
            picture.append(_el("rect", words, class_=class_, **box))
            at += share
    legend = [("cache", f"caches {bytes_text(resident)}")]
    if kept:
        legend.append(("old", f"old generations {bytes_text(kept)}"))
    legend += [("other", f"other {bytes_text(other)}")]
    legend += [("free", f"free {bytes_text(memory.free)} of {bytes_text(memory.total)}")]
    picture.set("aria-label", ", ".join(text for _, text in legend))
    items = (_el("li", _el("i", class_=class_), text) for class_, text in legend)
    return [picture, _el("ul", *items, class_="legend")]


# ---- engine services


def _services(view: View) -> Iterator[Element]:
    replies, errors = view.services
    if not replies and not errors:
        return
    rows = [_service(reply, view.at) for reply in replies]
    for name, error in errors.items():
        rows.append([name, _state("no answer"), "–", "–", "–", *_lines(str(error), class_="error")])
    head = ("service", "state", "address", "engines", "takeovers", "detail")
    yield _el("section", _el("h2", "Engine services"), _table(head, rows, "services"))


def _service(reply: dict[str, Any], now: float) -> list[Element | str]:
    engines = _el("div")
    for engine in reply["engines"]:
        requests = f", {engine['requests']} requests" if engine["state"] == "serving" else ""
        text = f" pid {engine['pid']}, {_ago(now, engine['since'])}{requests}"
        line = _el(
            "div", f"{engine['number']} {engine['state']}", _el("span", text, class_="quiet")
        )
        engines.append(line)
    takeovers: Element | str = "0"
    if reply["takeovers"]:
        last = _lines(f"last in {reply['last_takeover_s']:.2f} s")
        takeovers = _el("div", str(reply["takeovers"]), *last)
    detail = _el("div", *_lines(f"model {reply['model']}, used {_ago(now, reply['used'])} ago"))
    if reply["error"]:
        detail.extend(_lines(f"the last start failed: {reply['error']}", class_="error"))
    return [
        reply["name"], _state(reply["state"]), reply["listen"], engines, takeovers, detail,
    ]  # fmt: skip
