"""Whether ``lightning-dist launch`` runs torchrun or ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dist.cli import launch_accelerate, launch_plan
from lightning_dist.cli.launch_plan import Plan
from lightning_dist.cli.launch_script import needs
from lightning_dist.cli.launch_words import is_missing
from lightning_dist.configuration.places import accelerate_default, sidecar_of

_UNCONFIGURED = "no --config_file, and lightning-dist config has written none"


def choose(words: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """The plan of the launcher that these words are for; its first note says which and why.

    ``accelerate launch``: ``--config_file`` names its file, or ``lightning-dist config`` has
    written one at the default place, every option is one of its own, and where it could be one of
    torchrun's too the script imports accelerate and not Lightning. Otherwise torchrun.

    Raises:
        ValueError: the words are for neither, or for both and the script does not say for which.
    """
    default = accelerate_default(environ)
    is_configured = default.is_file() and sidecar_of(default).is_file()
    names_file = any(word.startswith(("--config_file", "--config-file")) for word in words)
    plain = _of_torchrun(words, environ)
    if plain is not None and plain.torchrun:
        return _torchrun(words, environ, "--torchrun")
    if not is_configured and not names_file:
        return _torchrun(words, environ, _UNCONFIGURED)
    given, problem = _as_accelerate(words)
    if given is not None and given.config_file is not None:
        if given.torchrun:
            raise ValueError(
                "--config_file is for accelerate launch, and --torchrun asks for the other; "
                "leave out one"
            )
        file = Path(given.config_file)
        return _accelerate(words, environ, given, file, f"--config_file={file}")
    if names_file and plain is None and problem is not None:
        raise problem
    if not is_configured:
        return _torchrun(words, environ, _UNCONFIGURED)
    if given is None:
        return _torchrun(words, environ, f"not accelerate launch with {default}: {problem}")
    if plain is not None and not is_missing(plain):
        framework, reason = needs(plain, Path.cwd())
        if framework == "lightning":
            why = f"{reason}; --config_file={default} for accelerate launch"
            return _torchrun(words, environ, why)
        if not framework:
            raise ValueError(
                f"{reason}, and {default} is there: say which launcher is meant: --torchrun, or "
                f"--config_file={default}"
            )
    why = f"{default}; --torchrun for the other"
    return _accelerate(words, environ, given, default, why)


def _torchrun(words: Sequence[str], environ: Mapping[str, str], why: str) -> Plan:
    made = launch_plan.plan(words, environ)
    made.notes.insert(0, f"torchrun ({why})")
    return made


def _accelerate(
    words: Sequence[str], environ: Mapping[str, str], given: Any, file: Path, why: str
) -> Plan:
    made = launch_accelerate.plan(words, environ, given=given, file=file)
    made.notes.insert(0, f"accelerate launch ({why})")
    return made


def _as_accelerate(words: Sequence[str]) -> tuple[Any, Exception | None]:
    try:
        return launch_accelerate.parse(words), None
    except (ValueError, ImportError) as error:
        return None, error


def _of_torchrun(words: Sequence[str], environ: Mapping[str, str]) -> Any | None:
    """What torchrun makes of the words, to which ``--config_file`` is the script's; or None."""
    try:
        return launch_plan.parse(words, environ)
    except ValueError:
        return None
