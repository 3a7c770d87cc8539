"""Fixtures of the tests of one module."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _only_this_module_s_objects_are_collected() -> None:
    """Checks for leaks collect garbage after each test.

    Once a module has imported vLLM, its whole heap would take half a second each time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    # Extension modules complain about objects that outlive the interpreter.
    gc.unfreeze()
