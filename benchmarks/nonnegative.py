"""Least squares without negative coefficients, for a few of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TOLERANCE = 1e-12


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """argmin |matrix x - target| with x >= 0: Lawson and Hanson's active set."""
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    scaled = matrix / scale  # seconds per byte beside seconds per round
    count = scaled.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= _TOLERANCE * max(1.0, float(np.linalg.norm(target))):
            break
        free[gradient.argmax()] = True
        while True:
            solution = np.zeros(count)
            solution[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            pairs = zip(x[negative], solution[negative], strict=True)
            # Go towards the solution until the first coefficient is 0, and leave that out.
            step = min(a / (a - b) if a > 0 else 0.0 for a, b in pairs)
            x = x + step * (solution - x)
            free &= x > _TOLERANCE
            x[~free] = 0.0
        x = solution
    return x / scale
