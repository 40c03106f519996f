"""Train with compressed gradients under Accelerate, with no change of the script.

    accelerate launch [OPTIONS] -m lightning_dist.run train.py --lr 0.1
    torchrun [OPTIONS] -m lightning_dist.run -m package.train --lr 0.1

Every Accelerator that the script makes gets a CompressedDDPPlugin(), or with FSDP2 a
CompressedFSDPPlugin(), or where the settings name a method a LocalUpdatesPlugin(), with the
settings from variables LIGHTNING_DIST_* and files (docs/command-line.md), unless the script has
attached one itself. Exit code 2: the words or the
settings are wrong; otherwise it is the script's.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BAD_INPUT = 2


def require_script(name: str, *, is_module: bool) -> None:
    """Refuse a script that is not there."""
    if not name or name.startswith("-"):
        raise ValueError("No script: python -m lightning_dist.run script.py [ARGUMENTS]")
    if not is_module and not Path(name).exists():
        raise ValueError(
            f"There is no script {name}; give its path from the current folder, or -m MODULE"
        )


def run_script(name: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a file or a module as ``python script.py ARGUMENTS`` would."""
    sys.argv = [name, *arguments]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        # In the place of the current folder, which -m has put there.
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def main() -> None:
    """Run the words of this process."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    is_module = words[:1] == ["-m"]
    name, *arguments = words[is_module:] or [""]
    try:
        require_script(name, is_module=is_module)
        # Torch and Accelerate, which --help and a wrong word need not wait for.
        from lightning_dist import accelerate as ours
        from lightning_dist.frameworks.accelerate.patch import attached_everywhere
        from lightning_dist.frameworks.accelerate.transformers import residuals_in_checkpoints
        from lightning_dist.settings import resolve

        is_local = resolve().value("method") is not None
        plugin = ours.LocalUpdatesPlugin if is_local else ours.CompressedDDPPlugin
        plugin()  # settings that cannot be are said now
    except (OSError, ValueError) as error:
        print(f"lightning_dist.run: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None

    with residuals_in_checkpoints() as add:

        def attach(accelerator: Any) -> None:
            kind = ours.CompressedFSDPPlugin if accelerator.is_fsdp2 else plugin
            attached = kind().attach(accelerator)
            if isinstance(attached, ours.Compression):
                add(accelerator, attached)

        with attached_everywhere(attach) as seen:
            run_script(name, arguments, is_module=is_module)
    if not seen:
        from lightning_dist.base.log import prefixed

        print(
            prefixed(
                f"{name} has prepared no model with an Accelerator, so nothing was "
                "compressed; call accelerator.prepare(model) in it"
            ),
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
