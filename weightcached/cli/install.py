"""`weightcachectl install` and `uninstall`: what comes besides units and manifest, and the next steps."""

from __future__ import annotations

import os
from pathlib import Path

from weightcached.cli import completion
from weightcached.cli.man_pages import pages
from weightcached.errors import HomeError
from weightcached.system.host_checks import output
from weightcached.system.paths import data_home


def other_files() -> dict[Path, str]:
    """Manual pages and shell completion, by path. None of them for a user without a home."""
    try:
        base = data_home()
    except HomeError:
        return {}
    made = {base / "man" / name: text for name, text in pages().items()}
    return made | {base / name: text for name, text in completion.scripts().items()}


def hints() -> list[str]:
    """Lines for a user whose `man` or zsh does not look where other_files() are."""
    found: list[str] = []
    base = data_home()
    # None without man.
    searched = output("manpath", "-q")
    if searched is not None and str(base / "man") not in searched.split(":"):
        found.append(f"man does not look in {base / 'man'}: export MANPATH={base / 'man'}:")
    if Path(os.environ.get("SHELL", "")).name == "zsh":
        found.append(
            f"zsh completes it after 'fpath+=({base / completion.ZSH_DIR})' before compinit in ~/.zshrc"
        )
    return found
