"""``python -m lightning_dist``: the program ``lightning-dist``."""

from __future__ import annotations

import sys

from lightning_dist.base.optional import needed_by


def main() -> None:
    """Run the program with the arguments of this process."""
    try:
        with needed_by("lightning-dist"):
            from lightning_dist.cli import main as program
    except ImportError as error:
        sys.exit(str(error))
    program()


if __name__ == "__main__":
    main()
