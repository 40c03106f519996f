"""Private and undocumented names of Accelerate and transformers, the former verified on import.

How names are verified is in :mod:`lightning_dist.base.features`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_dist.base.features import ACCELERATE, ACCELERATE_COMMANDS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


ACCELERATE.require()


# Hooks of save_state are given the models, and nothing is called when one is prepared.
def prepared_models(accelerator: Accelerator) -> Sequence[nn.Module]:
    """The models that an Accelerator has prepared, in their order."""
    found: Sequence[nn.Module] = accelerator._models
    return found


def prepared_optimizers(accelerator: Accelerator) -> Sequence[Any]:
    """The optimizers that an Accelerator has prepared, in their order."""
    found: Sequence[Any] = accelerator._optimizers
    return found


# Rank 0 alone saves them, and load_state notices too late that there are others.
def registered_objects(accelerator: Accelerator) -> Sequence[Any]:
    """Objects given to ``register_for_checkpointing``, in their order."""
    found: Sequence[Any] = accelerator._custom_objects
    return found


# `kwargs_handlers` takes no class but Accelerate's own.
def ddp_handler(accelerator: Accelerator) -> Any:
    """The arguments of DDP; None if there are none."""
    return getattr(accelerator, "ddp_handler", None)


def set_ddp_handler(accelerator: Accelerator, handler: Any) -> None:
    """Put ``handler`` where an Accelerator asks for the arguments of DDP."""
    accelerator.ddp_handler = handler


# `accelerate config` and `accelerate launch` have no API.
def ask_for_configuration() -> Any:
    """Accelerate's questions, on this terminal. Its configuration."""
    ACCELERATE_COMMANDS.require()
    from accelerate.commands.config.config import get_user_input

    return get_user_input()


def read_configuration(path: str) -> Any:
    """Accelerate's configuration in a file."""
    ACCELERATE_COMMANDS.require()
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(path)


def write_default_configuration(path: str) -> Any:
    """Write what ``accelerate config default`` would; where it is."""
    ACCELERATE_COMMANDS.require()
    from accelerate.commands.config.default import write_basic_config

    return write_basic_config(save_location=path)


def launch_parser() -> Any:
    """The parser of ``accelerate launch``."""
    ACCELERATE_COMMANDS.require()
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def launch() -> None:
    """Run the command line of this process as ``accelerate launch`` does."""
    ACCELERATE_COMMANDS.require()
    from accelerate.commands.launch import main

    main()


# Unlike torch.load it allows arrays of NumPy with weights_only.
def load_restricted(*args: Any, **kwargs: Any) -> Any:
    """Function with which Accelerate reads its files."""
    from accelerate.utils.other import load

    return load(*args, **kwargs)
