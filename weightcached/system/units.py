"""`weightcachectl install` and `uninstall`: the unit files and an example manifest in the user's
configuration, and other files that the caller has made.

Every file written has a line at its beginning that holds the digest of the rest. So a file that
somebody has edited is recognised, by this and by every later version, and never overwritten or
removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from weightcached.errors import InstallError
from weightcached.system.paths import config_home

UNITS = (
    "weightcached@.service",
    "weightcached-exporter.service",
    "weightcached-engine@.service",
    "weightcached.target",
)
MANIFEST = "manifest.yaml"
# Path of the commands in the tree's unit files, as a distribution would install them.
_PACKAGED_BIN = "/usr/bin"
_COMMANDS = ("weightcached", "weightcachectl")
_WRITTEN_BY = "Written by 'weightcachectl install', unchanged while sha256 is "
# Manual pages have their own comments.
_HEADER = re.compile(rf"""^(?:#|\.\\") {_WRITTEN_BY}([0-9a-f]{{64}})\n""", re.MULTILINE)

Action = Literal["wrote", "unchanged", "updated", "kept", "removed", "absent"]


class Outcome(NamedTuple):
    """The action taken with one file."""

    path: Path
    action: Action


def unit_dir() -> Path:
    """The directory in which the user manager looks for the user's own units."""
    return config_home() / "systemd/user"


def destinations() -> dict[Path, str]:
    """The units and the manifest as install() writes them, and the name of each one's source."""
    files = {unit_dir() / name: name for name in UNITS}
    return files | {user_manifest(): MANIFEST}


def user_manifest() -> Path:
    """The user's own manifest."""
    return config_home() / "weightcached" / MANIFEST


def install(
    *, bin_dir: Path | None = None, others: Mapping[Path, str] | None = None
) -> list[Outcome]:
    """Write missing files, update unedited ones, keep the rest; others: the text of more files.

    Raises InstallError before it writes anything.
    """
    commands = bin_dir or commands_dir()
    texts = {path: _content(name, commands) for path, name in destinations().items()}
    contents = {path: _with_header(text) for path, text in {**texts, **(others or {})}.items()}
    return [
        _try_action(path, lambda path: Outcome(path, _write(path, contents[path])))
        for path in contents
    ]


def commands_dir() -> Path:
    """Directory of this environment's commands: the running one's, or the interpreter's."""
    # pip install --target and pipx put them elsewhere than sysconfig knows.
    running = Path(sys.argv[0])
    if running.name in _COMMANDS and running.is_file():
        return running.absolute().parent
    return Path(sysconfig.get_path("scripts"))


def uninstall(others: Iterable[Path] = ()) -> list[Outcome]:
    """Remove unedited files of install(), and the links that enable them. Raises InstallError."""
    outcomes = [
        _try_action(path, lambda path: Outcome(path, _remove(path)))
        for path in (*destinations(), *others)
    ]
    gone = {outcome.path for outcome in outcomes if outcome.action != "kept"}
    links = [
        link for link in sorted(unit_dir().glob("*.wants/weightcached*")) if _leads_to(link) in gone
    ]
    return outcomes + [
        _try_action(link, lambda link: Outcome(link, _unlink(link))) for link in links
    ]


def is_unmodified(text: str) -> bool:
    """Whether a file's text is as install() wrote it, in this version or another."""
    header = _HEADER.search(text)
    if header is None:
        return False
    return header[1] == _digest(text[: header.start()] + text[header.end() :])


def source(name: str) -> Path:
    """A unit file or the example manifest: in the installed package, or in a source tree."""
    folder = "etc" if name == MANIFEST else "systemd"
    package = Path(__file__).parents[1]
    packaged = package / "data" / folder / name
    if packaged.exists():
        return packaged
    return package.parent / ("etc/weightcached" if name == MANIFEST else "systemd") / name


def _content(name: str, commands: Path) -> str:
    text = source(name).read_text(encoding="utf-8")
    if not name.endswith(".service"):
        return text
    for command in _COMMANDS:
        if not os.access(commands / command, os.X_OK):
            raise InstallError(
                f"{commands / command} is not an executable file: install the package weightcached there"
            )
        text = text.replace(f"={_PACKAGED_BIN}/{command} ", f"={_quote(commands / command)} ")
    return text


def _quote(command: Path) -> str:
    """The path as systemd reads it in a command line (systemd.service(5), COMMAND LINES)."""
    text = str(command)
    # systemd takes none of these in the path of an executable, however they are quoted.
    if not re.fullmatch(r"""[^\x00-\x1f\x7f$"'\\]+""", text):
        raise InstallError(
            f"{text!r} cannot stand in a unit file: install under a path without $, quotes, backslashes"
        )
    text = text.replace("%", "%%")
    return f'"{text}"' if re.search(r"[\s;]", text) else text


def _with_header(text: str) -> str:
    # zsh looks for the command's name in the first line.
    first, rest = text.split("\n", 1) if text.startswith("#compdef") else ("", text)
    mark = '.\\"' if text.startswith(".") else "#"
    return (f"{first}\n" if first else "") + f"{mark} {_WRITTEN_BY}{_digest(text)}\n{rest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _try_action(path: Path, action: Callable[[Path], Outcome]) -> Outcome:
    try:
        return action(path)
    except (OSError, UnicodeDecodeError) as e:
        raise InstallError(
            f"{path}: {e.strerror if isinstance(e, OSError) else 'not UTF-8'}: move it away"
        ) from e


def _write(path: Path, text: str) -> Action:
    action: Action = "wrote"
    if os.path.lexists(path):
        old = path.read_text(encoding="utf-8")
        if old == text:
            return "unchanged"
        # The manifest belongs to the operator from the start: a newer example does not replace it.
        if path.name == MANIFEST or not is_unmodified(old):
            return "kept"
        action = "updated"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return action


def _remove(path: Path) -> Action:
    if not os.path.lexists(path):
        return "absent"
    if not is_unmodified(path.read_text(encoding="utf-8")):
        return "kept"
    return _unlink(path)


def _unlink(path: Path) -> Action:
    path.unlink()
    return "removed"


def _leads_to(link: Path) -> Path | None:
    """Target of a link that `systemctl enable` made, which may be gone; None for anything else."""
    return link.parent / link.readlink() if link.is_symlink() else None
