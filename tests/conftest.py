"""Teaches pytest the mark ``ranks``; see ``harness/plugin.py``."""

from harness.plugin import (
    group,
    pytest_collection_finish,
    pytest_configure,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_unconfigure,
)

__all__ = [
    "group",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pyfunc_call",
    "pytest_unconfigure",
]
