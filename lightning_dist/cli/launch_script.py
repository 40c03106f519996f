"""Which launcher a script is for, by what it imports. The script is read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

_ACCELERATE = ("accelerate", "lightning_dist.accelerate", "lightning_dist.transformers")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
RUN = "lightning_dist.run"


def needs(given: Any, folder: Path) -> tuple[Literal["accelerate", "lightning", ""], str]:
    """The framework whose launcher the script needs, and why; "" where that is not clear.

    Modules of the user's own that lie beside the script are read too.

    Args:
        given: what a launcher's parser makes of the command line.
        folder: in which modules of ``-m`` are looked for.
    """
    name = given.training_script
    if given.module and name == RUN:
        return "accelerate", f"{RUN} is for scripts of Accelerate's"
    path = _module(folder, name.split(".")) if given.module else Path(name)
    if given.no_python or path is None:
        return "", f"{name} cannot be read"
    root = folder if given.module else path.parent
    found = set(_imports(path, root, set()))
    accelerate = _first(found, _ACCELERATE)
    lightning = _first(found, _LIGHTNING)
    if accelerate and lightning:
        return "", f"{name} imports {accelerate} and {lightning}"
    if lightning:
        return "lightning", f"{name} imports {lightning}"
    accelerate = accelerate or _first(found, ("transformers",))  # whose Trainer is Accelerate's
    if accelerate:
        return "accelerate", f"{name} imports {accelerate}"
    return "", f"{name} imports neither accelerate nor lightning"


def _first(found: set[str], packages: tuple[str, ...]) -> str:
    return next((p for p in packages if any(f"{f}.".startswith(f"{p}.") for f in found)), "")


def _imports(path: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    """Full names of what is imported in a file, and in modules under ``root`` that it imports."""
    if path in seen:
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        folder, is_relative = root, False
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            is_relative = node.level > 0
            if is_relative:
                folder = path.parents[min(node.level, len(path.parents)) - 1]
        for name in names:
            if not is_relative:
                yield name
            parts = name.split(".")
            for length in range(1, len(parts) + 1):  # importing a.b imports a too
                module = _module(folder, parts[:length])
                if module is not None:
                    yield from _imports(module, root, seen)


def _module(folder: Path, parts: list[str]) -> Path | None:
    place = folder.joinpath(*parts)
    candidates = (place.with_name(f"{place.name}.py"), place / "__main__.py", place / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)
