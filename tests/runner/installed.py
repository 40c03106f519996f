"""The packages of this environment are those that ``make install`` brings, and no others.

    .venv/bin/python -m tests.runner.installed

So a test that needs another package fails in CI as it does for whoever has just installed.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WANTED = ("torch", "lightning-dist[dev]")
OF_VENV = {"pip", "setuptools"}


def required(wanted: tuple[str, ...]) -> set[str]:
    """Names of distributions that these need, with what those need."""
    found, todo = set[tuple[str, str]](), [Requirement(each) for each in wanted]
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        for extra in {"", *each.extras}:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                needs = map(Requirement, distribution(name).requires or ())
            except PackageNotFoundError:  # of another platform
                continue
            todo += [n for n in needs if n.marker is None or n.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def main() -> int:
    installed = {canonicalize_name(each.metadata["Name"]) for each in distributions()}
    others = sorted(installed - required(WANTED) - OF_VENV)
    print(
        f"{len(installed)} packages, besides those of make install: {', '.join(others) or 'none'}"
    )
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
