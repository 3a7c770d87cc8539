"""The loader's options: vLLM's documented ones are accepted, others refused; whole messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightcache_loader.options import LoaderOptions, parse_options

KNOWN = (
    "socket_path, socket_dir, mode, fallback, connect_timeout_s, state_timeout_s, fallback_load_format, "
    "fallback_extra_config, identity, start_parked"
)
WHERE = "model_loader_extra_config of load format ipc_cache"


@pytest.mark.parametrize("nothing", [None, {}])
def test_defaults_map_and_fall_back(nothing: dict[str, Any] | None) -> None:
    options = parse_options(nothing, "ipc_cache")
    assert options == LoaderOptions()
    assert (options.mode, options.fallback, options.role, options.directory()) == (
        "zero_copy",
        True,
        "target",
        None,
    )
    assert (options.connect_timeout_s, options.state_timeout_s) == (5.0, 300.0)


def test_every_option_is_accepted() -> None:
    given = {
        "socket_dir": "/run/wc",
        "mode": "copy",
        "fallback": False,
        "connect_timeout_s": 1,
        "state_timeout_s": 0,
        "fallback_load_format": "safetensors",
        "fallback_extra_config": {"enable_multithread_load": True},
        "identity": "sampled",
        "start_parked": True,
        "is_draft": True,
    }
    options = parse_options(given, "ipc_cache")
    assert options == LoaderOptions(**given)  # type: ignore[arg-type]
    assert (options.role, options.directory()) == ("draft", Path("/run/wc"))
    assert parse_options({"socket_path": "/run/x.sock"}, "ipc_cache").socket_path == "/run/x.sock"


def test_values_from_a_command_line_are_converted() -> None:
    options = parse_options({"fallback": "false", "connect_timeout_s": "2.5"}, "ipc_cache")
    assert (options.fallback, options.connect_timeout_s) == (False, 2.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"socket": "/x"},
            f"{WHERE}: unknown key 'socket' (did you mean 'socket_dir'?); known keys: {KNOWN}",
        ),
        (
            {"falback": 1},
            f"{WHERE}: unknown key 'falback' (did you mean 'fallback'?); known keys: {KNOWN}",
        ),
        ({"zzz": 1}, f"{WHERE}: unknown key 'zzz'; known keys: {KNOWN}"),
        ({"mode": "share"}, f"{WHERE}: Invalid enum value 'share' - at `$.mode`"),
        ({"fallback": "maybe"}, f"{WHERE}: Expected `bool`, got `str` - at `$.fallback`"),
        (
            {"connect_timeout_s": "soon"},
            f"{WHERE}: Expected `float`, got `str` - at `$.connect_timeout_s`",
        ),
        (
            {"fallback_extra_config": []},
            f"{WHERE}: Expected `object`, got `array` - at `$.fallback_extra_config`",
        ),
        (
            {"socket_path": "/x", "socket_dir": "/y"},
            "model_loader_extra_config: socket_path and socket_dir exclude each other; leave one out",
        ),
        (
            {"connect_timeout_s": 0},
            "model_loader_extra_config: connect_timeout_s 0.0 must be above 0, state_timeout_s 300.0 at least 0",
        ),
        (
            {"state_timeout_s": -1},
            "model_loader_extra_config: connect_timeout_s 5.0 must be above 0, state_timeout_s -1.0 at least 0",
        ),
        (
            {"connect_timeout_s": float("nan")},
            "model_loader_extra_config: connect_timeout_s nan must be above 0, state_timeout_s 300.0 at least 0",
        ),
        (
            {"fallback_load_format": "weightcached"},
            "model_loader_extra_config: fallback_load_format must be a load format that reads from disk",
        ),
        (
            {"fallback_load_format": "ipc_cache"},
            "model_loader_extra_config: fallback_load_format must be a load format that reads from disk",
        ),
    ],
    ids=str,
)
def test_wrong_option_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as e:
        parse_options(given, "ipc_cache")
    assert str(e.value) == text


def test_message_names_the_load_format_that_was_asked_for() -> None:
    with pytest.raises(
        ValueError,
        match=r"^model_loader_extra_config of load format weightcached: unknown key 'x';",
    ):
        parse_options({"x": 1}, "weightcached")


def test_given_mapping_is_left_alone() -> None:
    given = {"mode": "copy"}
    parse_options(given, "ipc_cache")
    assert given == {"mode": "copy"}
