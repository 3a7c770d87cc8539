"""Programs on PATH that log their calls and answer as scripted, e.g. instead of systemctl."""

from __future__ import annotations

from pathlib import Path


class Commands:
    """A directory to put in front of PATH. An unscripted call ends with status 1, silently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "log").touch()

    def answer(
        self, name: str, arguments: str, *outputs: str, status: int = 0, stderr: str = ""
    ) -> None:
        """Answer `name arguments` with the outputs one after the other, the last one for good.

        `arguments` may be a shell pattern.
        """
        script = self.folder / name
        if not script.exists():
            script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.folder}/log"\n')
            script.chmod(0o755)
        number = len(list(self.folder.glob("answer-*")))
        answer = self.folder / f"answer-{number}"
        answer.mkdir()
        for at, text in enumerate(outputs or ("",)):
            (answer / f"{at}").write_text(text)
        (answer / "stderr").write_text(stderr)
        with script.open("a") as file:
            file.write(
                f'case "$*" in {arguments.replace(" ", chr(92) + " ")})\n'
                f'  cd "{answer}"; set -- $(ls | grep -x "[0-9]*" | sort -n)\n'
                f'  cat "$1"; cat stderr >&2; [ $# -gt 1 ] && rm "$1"; exit {status};;\nesac\n'
            )

    def finish(self) -> None:
        """Make everything else fail."""
        for script in self.folder.iterdir():
            if script.is_file() and script.name != "log":
                with script.open("a") as file:
                    file.write("exit 1\n")

    def calls(self) -> list[str]:
        """Every call so far, as `name arguments`."""
        return (self.folder / "log").read_text().splitlines()
