"""Shell completion of `weightcachectl` and `weightcached`: click's own scripts, and the places where
shells look for them.
"""

from __future__ import annotations

from typing import Any

from click.shell_completion import get_completion_class

COMMANDS = ("weightcachectl", "weightcached")
# Below $XDG_DATA_HOME. zsh looks there only if fpath says so.
ZSH_DIR = "zsh/site-functions"
_PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": ZSH_DIR + "/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}


def scripts() -> dict[str, str]:
    """The scripts by their place below $XDG_DATA_HOME."""
    return {
        place.format(command): _script(shell, command)
        for shell, place in _PLACES.items()
        for command in COMMANDS
    }


def _script(shell: str, command: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None
    # Not source(), which asks the version of a bash that may not be there.
    variable = f"_{command.upper()}_COMPLETE"
    made: Any = kind(None, {}, command, variable)  # type: ignore[arg-type]
    return str(made.source_template % made.source_vars()).strip() + "\n"
