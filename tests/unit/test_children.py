"""The environment of a daemon's child. tests/process has the fates of children."""

from __future__ import annotations

import pytest

from weightcached.daemon.children import environment_of


@pytest.fixture(autouse=True)
def of_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/user/0/systemd/notify")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_is_installed_beside_the_interpreter_is_found_first() -> None:
    assert environment_of("/opt/vllm/bin/python")["PATH"] == "/opt/vllm/bin:/usr/local/bin:/usr/bin"


@pytest.mark.parametrize("program", ["/usr/bin/python3", "python3", "bin/python"])
def test_path_stays_where_it_has_the_interpreter_or_finds_it(program: str) -> None:
    assert environment_of(program)["PATH"] == "/usr/local/bin:/usr/bin"


def test_interpreter_is_searched_beside_the_default_where_there_is_no_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PATH")
    assert environment_of("/opt/vllm/bin/python")["PATH"] == "/opt/vllm/bin:/bin:/usr/bin"


def test_child_sees_its_device_alone_and_nothing_of_the_managers() -> None:
    environment = environment_of("python3", "GPU-5")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert "NOTIFY_SOCKET" not in environment
    assert "CUDA_VISIBLE_DEVICES" not in environment_of("python3", "cpu0")
