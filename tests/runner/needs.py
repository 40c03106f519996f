"""Tests of features that not every torch, Lightning or Accelerate has: ``@needs(FSDP)``."""

import pytest

from lightning_dist.base.features import Feature


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Skips where a name of the feature is missing."""
    reason = f"{feature.title} needs {feature.package} {feature.since}"
    return pytest.mark.skipif(feature.missing is not None, reason=reason)
