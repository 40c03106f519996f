"""The program ``lightning-dist``.

Commands raise what is wrong; :func:`~lightning_dist.cli.command.reported` makes one line and an
exit code of it. Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_dist.base.features import FEATURES
from lightning_dist.base.versions import versions
from lightning_dist.cli import ckpt, profile
from lightning_dist.cli.bench import bench
from lightning_dist.cli.codecs import codecs
from lightning_dist.cli.config import config
from lightning_dist.cli.doctor import doctor
from lightning_dist.cli.launch import PASS_ON, launch
from lightning_dist.cli.launch_plan import USAGE

_PACKAGES = ("lightning", "accelerate", "transformers", "triton", "wandb")
"""Installed ones of these are in the output of ``--version``."""

app = typer.Typer(
    name="lightning-dist",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which keeps the line breaks of docstrings
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(profile.app, name="profile")
app.command("config")(config)
app.command("launch", context_settings=PASS_ON, options_metavar=USAGE)(launch)
app.command("bench")(bench)
app.command("doctor")(doctor)
app.command("codecs")(codecs)


def _print_version(wanted: bool) -> None:
    if wanted:
        for name, version in versions(_PACKAGES).items():
            typer.echo(f"{name.replace('lightning_dist', 'lightning-dist')} {version}")
        typer.echo()
        for feature in FEATURES:
            typer.echo(f"{feature.title}: {feature.by_version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print versions and features, and exit.",
        ),
    ] = False,
) -> None:
    """Tools for training with lightning_dist.

    Exit codes: 0: success; 1: the command ran and found a problem; 2: wrong input, or the command
    failed. `launch` exits with the code of the program that it runs.
    """


def main() -> None:
    """Run the program with the arguments of this process."""
    app(prog_name="lightning-dist")
