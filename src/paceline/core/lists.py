"""Convert tensors to lists, which are faster than tensor operations for a few rows."""

from typing import Any

from torch import Tensor


def as_list(values: Tensor) -> list[Any]:
    """Nested lists of plain numbers."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
