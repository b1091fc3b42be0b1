"""From tensors to plain Python numbers.

For the bookkeeping of a few rows a list is far quicker than a chain of tensor operations.
"""

from typing import Any

from torch import Tensor


def as_list(values: Tensor) -> list[Any]:
    """Plain numbers, nested as the tensor is."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
