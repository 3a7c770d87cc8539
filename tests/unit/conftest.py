"""What the tests of one module each have."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _only_this_module_s_objects_are_collected() -> None:
    """Checks for leaks collect after each test; all of vLLM's heap, once a module has imported it,
    would take half a second each time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    # Extension modules complain about objects that outlive the interpreter.
    gc.unfreeze()
