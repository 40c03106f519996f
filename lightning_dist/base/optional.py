"""Packages that a part of this one needs, and that an installation may lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "accelerate": "accelerate",
    "jinja2": "profile",
    "plotly": "profile",
    "transformers": "transformers",
    "wandb": "wandb",
}
"""Extras of this package by the module that each brings; all others come with the package."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Let a package that is missing within the body be one line, with the command for it.

    Args:
        what: the part that needs it, as its users call it; begins a sentence.

    Raises:
        ImportError: instead of ``ModuleNotFoundError``, for modules other than our own.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lightning_dist"):
            raise
        extra = EXTRAS.get(package)
        wanted = f"'lightning-dist[{extra}]'" if extra else package
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install {wanted}"
        ) from None
