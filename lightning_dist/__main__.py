"""``python -m lightning_dist``: the program ``lightning-dist``."""

from __future__ import annotations

from lightning_dist.cli import main

if __name__ == "__main__":
    main()
