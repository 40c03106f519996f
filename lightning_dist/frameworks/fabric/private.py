"""Private and undocumented names of Fabric."""

from __future__ import annotations

from torch import nn


# Fabric's `module` is the one that the user gave, without DDP.
def without_fabric(model: nn.Module) -> nn.Module:
    """The module that Fabric has wrapped for a user; the model itself if it has not."""
    inner: nn.Module = getattr(model, "_forward_module", model)
    return inner
