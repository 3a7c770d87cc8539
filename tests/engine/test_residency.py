"""Real vLLM engines of two models that share the room of one: loaded when they ask, evicted for each
other, restored from snapshots.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.engine.conftest import READY_TIMEOUT_S, Engines, Service
from tests.engine.test_end_to_end import UNIT, entry
from tests.fakes.client import Client
from tests.fakes.daemon import until
from weightcached.wire.fetch import fetch_index

# bfloat16 and float32; a budget for either, not for both.
DTYPES = {"untied": "bfloat16", "tied": "float32"}
BUDGET = 16 << 20


def test_tokens_are_those_from_disk_after_eviction_and_restore(
    service: Service, engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    disk = {name: engines.tokens(models[name], dtype=DTYPES[name]) for name in DTYPES}
    on_demand = [
        entry(name, models[name], "cpu0", dtype=dtype) | {"resident": "on-demand"}
        for name, dtype in DTYPES.items()
    ]
    service.manifest(*on_demand, budget=BUDGET, snapshots={"dir": str(tmp_path / "snapshots")})
    service.ctl("start", "cpu0")
    try:
        assert states(service) == {"untied": "evicted", "tied": "evicted"}
        sizes = []
        for name, source in (
            ("untied", "loaded"),
            ("tied", "loaded"),
            ("untied", "restored"),
            ("tied", "restored"),
        ):
            assert attached_tokens(engines, models, name) == disk[name]
            engines.ask(close=True)
            found = cache(service, name)
            assert (found["state"], found["source"]) == ("ready", source)
            sizes.append(found["bytes"])
            assert sorted(states(service).values()) == ["evicted", "ready"]
            written(service, name)
        assert max(sizes) <= BUDGET < sizes[0] + sizes[1]

        # By hand, beside the engine that maps it, and after it.
        assert attached_tokens(engines, models, "tied") == disk["tied"]
        refused = service.ctl("evict", "tied", check=False)
        assert refused.returncode == 1
        assert f"tied/target is in use by pid {engines.process.pid}" in refused.stderr
        assert engines.ask(again=True)["tokens"] == disk["tied"]
        engines.ask(close=True)
        until(lambda: not cache(service, "tied")["engines"], "it has left")
        assert service.ctl("evict", "tied").stdout == "cpu0 tied/target: evicted\n"
        assert attached_tokens(engines, models, "tied") == disk["tied"]
        engines.ask(close=True)

        # As after a reboot: the manager keeps nothing of a stopped unit.
        service.ctl("stop", "cpu0")
        service.ctl("start", "cpu0")
        assert states(service) == {"untied": "evicted", "tied": "evicted"}
        assert attached_tokens(engines, models, "untied") == disk["untied"]
        engines.ask(close=True)
        assert cache(service, "untied")["source"] == "restored"
        assert service.ctl("verify").returncode == 0

        # Another process maps it: there is no room for the other model.
        directory = service.manager.runtime_dir / "weightcached"
        key = fetch_index("cpu0", "untied/target", for_what="asked for", socket_dir=directory).key
        with Client.welcome(directory / "cpu0.sock") as other:
            other.attach(key).close()
            engines.log()
            tokens = engines.tokens(models["tied"], "ipc_cache", dtype=DTYPES["tied"])
            assert tokens == disk["tied"]
            (line,) = [x for x in engines.plugin_log() if x.startswith("loading from disk")]
            assert "no room for tied/target: it needs" in line
            assert f"(mapped by pid {os.getpid()})" in line
    finally:
        engines.ask(close=True)
        service.ctl("stop", "cpu0", check=False)
        service.manager.systemctl("reset-failed", UNIT.format("cpu0"), check=False)


def attached_tokens(engines: Engines, models: dict[str, Path], name: str) -> Any:
    return engines.tokens(models[name], "ipc_cache", loader={"fallback": False}, dtype=DTYPES[name])


def states(service: Service) -> dict[str, str]:
    return {c["name"].partition("/")[0]: c["state"] for c in service.caches("cpu0")}


def cache(service: Service, name: str) -> dict[str, Any]:
    return next(c for c in service.caches("cpu0") if c["name"] == f"{name}/target")


def written(service: Service, name: str) -> None:
    until(
        lambda: cache(service, name)["snapshot"] == "written",
        f"a snapshot of {name}",
        bound_s=READY_TIMEOUT_S,
    )
