"""Manual pages, made from what the program itself says: click's help, the types of the manifest and
the comments of its example.

`weightcachectl install` writes them; a package's build calls `python -m weightcached.cli.man_pages
DIR`. No tool that makes pages of click's help is used: those known make one page for each command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import msgspec.inspect

from weightcached import __version__
from weightcached.cli import weightcachectl, weightcached
from weightcached.config.engines import EngineEntry
from weightcached.config.located_yaml import expected
from weightcached.config.manifest import Document, ModelEntry
from weightcached.config.snapshots import SnapshotsEntry
from weightcached.system.units import MANIFEST, source

MANIFEST_PAGE = "weightcached-manifest"
# Characters that groff would take for its own, or set as something that cannot be copied to a shell.
_ESCAPES = {
    "\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq",
}  # fmt: skip
_SEE_ALSO = ("weightcached(1)", "weightcachectl(1)", f"{MANIFEST_PAGE}(5)", "systemctl(1)")
_FILES = {
    "~/.config/weightcached/manifest.yaml": f"The manifest, see {MANIFEST_PAGE}(5); else the next.",
    "/etc/weightcached/manifest.yaml": "The manifest of users without one.",
    "$XDG_RUNTIME_DIR/weightcached": "Sockets of the daemons, one for each device.",
    "~/.cache/weightcached": "Digests of checkpoints, and snapshots.",
}  # fmt: skip
_PLACES = ("~/.config/weightcached/manifest.yaml", "/etc/weightcached/manifest.yaml")
_ABOUT_MANIFEST = """
One YAML file says which models stay resident on which devices. Every daemon of a user reads the same
file: the first of the two above. 'weightcachectl install' writes an example, 'weightcachectl add' and
'remove' change the file and keep its comments.

After an edit, 'weightcachectl plan' shows what goes where, and 'weightcachectl reload' applies it. A
mistake is named with its line and key, and changes nothing.
"""
# Entries of the manifest, each with the key under which it stands.
_ENTRIES: Mapping[str, type[msgspec.Struct]] = {
    "models": ModelEntry,
    "engines": EngineEntry,
    "snapshots": SnapshotsEntry,
}
# A key of the example, which may be commented out; then its value, and words after it.
_KEY_LINE = re.compile(r"^\s*(?:# *)?(?:- )?([a-z_]+):(?: ([^#]*?)(?:\s+# (.*))?)?$")


def pages() -> dict[str, str]:
    """The pages by their place below a directory of manual pages, e.g. `man1/weightcached.1`."""
    commands = {"weightcachectl": weightcachectl.main, "weightcached": weightcached.main}
    made = {f"man1/{name}.1": _command_page(name, group) for name, group in commands.items()}
    return made | {f"man5/{MANIFEST_PAGE}.5": _manifest_page()}


def _command_page(name: str, group: click.Group) -> str:
    ctx = click.Context(group, info_name=name, **group.context_settings)
    said = group.help or name
    lines = [*_head(name, 1, said.partition("\n\n")[0]), ".SH SYNOPSIS", *_usage(ctx)]
    lines += [".SH DESCRIPTION", *_paragraphs(said)]
    lines += [".SH OPTIONS", *_options(ctx), ".SH COMMANDS", *_commands(ctx)]
    lines += [".SH FILES", *_tagged(_FILES)]
    return _joined([*lines, *_see_also(f"{name}(1)")])


def _commands(ctx: click.Context) -> Iterator[str]:
    """The commands of a group and of the groups in it, by name."""
    assert isinstance(ctx.command, click.Group)
    for name, command in sorted(ctx.command.commands.items()):
        if command.hidden:
            continue
        inner = click.Context(command, ctx, info_name=name, **command.context_settings)
        usage = " ".join(command.collect_usage_pieces(inner))
        path = inner.command_path.partition(" ")[2]
        yield f".SS {_quoted(f'{path} {usage}')}"
        yield from _paragraphs(command.help or "")
        yield from _options(inner)
        if isinstance(command, click.Group):
            yield from _commands(inner)


def _usage(ctx: click.Context) -> Iterator[str]:
    yield f".B {_text(ctx.command_path)}"
    yield _text(" ".join(ctx.command.collect_usage_pieces(ctx)))


def _options(ctx: click.Context) -> Iterator[str]:
    for param in ctx.command.get_params(ctx):
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record is not None and "--help" not in param.opts:
            yield from _tagged({record[0]: record[1]})


def _manifest_page() -> str:
    example = source(MANIFEST).read_text(encoding="utf-8")
    said = comments(example)
    lines = [*_head(MANIFEST_PAGE, 5, "which models stay resident on which devices")]
    lines += [".SH SYNOPSIS", *_paragraphs("\n\n".join(_PLACES)), ".SH DESCRIPTION"]
    lines += _paragraphs(_ABOUT_MANIFEST)
    lines += _fields("", Document, said)
    for name, entry in _ENTRIES.items():
        lines += [f".SH {name.upper()}", *_paragraphs(f"{said[name]} Keys under {name}:".strip())]
        lines += _fields(name, entry, said)
    lines += [".SH EXAMPLE", ".nf", *map(_text, _without_comments(example)), ".fi"]
    return _joined([*lines, *_see_also(f"{MANIFEST_PAGE}(5)")])


def _fields(name: str, entry: type[msgspec.Struct], said: Mapping[str, str]) -> Iterator[str]:
    info = msgspec.inspect.type_info(entry)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if field.name in _ENTRIES:
            continue
        text = said.get(f"{name}.{field.name}".lstrip("."), "")
        kind = expected(field.type)
        kind = kind if "," in kind else kind.removeprefix("one of ")
        facts = [kind] if kind not in text else []
        if field.required:
            facts.append("required")
        elif "default:" not in text.lower():
            facts.append(f"default: {_default(field.default)}")
        yield from _tagged({field.name: f"{text} ({', '.join(facts)})"})


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int | str) and value != "" else "none"


def comments(example: str) -> dict[str, str]:
    """The comments of the example by key: `version`, `models`, `models.name`, … A key that follows
    another without a comment of its own has those after its value, or none.
    """
    found: dict[str, str] = {}
    section, pending = "", list[str]()
    for line in example.splitlines():
        match = _KEY_LINE.match(line)
        key = match[1] if match else ""
        if match and key in Document.__struct_fields__:
            section, name = key, key
        elif match and section in _ENTRIES and key in _ENTRIES[section].__struct_fields__:
            name = f"{section}.{key}"
        else:
            text = line.strip()
            pending = [*pending, text.lstrip("# ")] if text.startswith("#") else []
            continue
        found.setdefault(name, " ".join([*pending, match[3] or ""]).strip())
        pending = []
    return found


def _without_comments(example: str) -> list[str]:
    lines = (line for line in example.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in lines if line.strip()]


def _head(name: str, section: int, summary: str) -> list[str]:
    title = f".TH {name.upper()} {section} {_quoted('')} {_quoted(f'weightcached {__version__}')}"
    words = summary.rstrip(".")
    return [
        '.\\" Made from what the program says of itself. Change it there.',
        title,
        ".nh",
        ".ad l",
        ".SH NAME",
        rf"{name} \- {_text(words[:1].lower() + words[1:])}",
    ]


def _see_also(this: str) -> list[str]:
    return [".SH SEE ALSO", ",\n".join(_text(page) for page in _SEE_ALSO if page != this)]


def _tagged(texts: Mapping[str, str]) -> Iterator[str]:
    for tag, text in texts.items():
        yield ".TP"
        yield rf"\fB{_text(tag)}\fR"
        yield _text(text)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield ".PP"
        yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """Words for groff: ASCII alone, and no line that begins as a request."""
    escaped = "".join(_ESCAPES.get(c, c if c.isascii() else rf"\[u{ord(c):04X}]") for c in text)
    return rf"\&{escaped}" if escaped.startswith(".") else escaped


def _quoted(text: str) -> str:
    return f'"{_text(text)}"'


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main(directory: str) -> None:
    """Write the pages below `directory`."""
    for name, text in pages().items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
