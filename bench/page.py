"""Draw docs/page-1280.png and docs/page-400.png: the exporter's page of the node in tests/fakes/page_scene.py.

Needs Chromium. `make page` runs it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.chromium import Chromium  # noqa: E402
from tests.fakes.page_scene import Scene  # noqa: E402


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs", show_default=True)
@click.option("--dark", is_flag=True, help="Draw the dark one.")
def main(out: Path, dark: bool) -> None:
    """Draw the page at 1280 and at 400 pixels."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as directory:
        scene = Scene(Path(directory))
        with scene.served() as port, Chromium() as browser:
            for width in (1280, 400):
                browser.open(f"http://127.0.0.1:{port}/", width=width, dark=dark)
                path = out / f"page-{width}.png"
                browser.screenshot(path)
                click.echo(path)


if __name__ == "__main__":
    main()
