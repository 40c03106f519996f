"""Tiers of tests: those of ``make test``, slow ones, which CI runs too, and exhaustive ones.

Most are marked in the files of the tests; the others are in the list ``tiers.txt``.
"""

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

COLLECTED = pytest.StashKey[list[str]]()
"""In a run of all tests: their ids."""


@cache
def listed() -> dict[str, str]:
    """Tiers of the tests of the list, which have their parameters or are for all of them."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    words = (line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    return {test: tier for tier, test in words}


def naming_no_test(lines: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Lines that none of these tests is meant by; files with no test are not installed."""
    known = {name for test in tests for name in (test, test.partition("[")[0])}
    files = {test.partition("::")[0] for test in known}
    return [line for line in lines if line.partition("::")[0] in files and line not in known]


def some_exhaustive(values: Iterable[Any], exhaustive: Collection[Any]) -> list[Any]:
    """Values of a parameter, of which some are for the exhaustive tier."""
    mark = pytest.mark.exhaustive
    return [pytest.param(each, marks=mark) if each in exhaustive else each for each in values]
