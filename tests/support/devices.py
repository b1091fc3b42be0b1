"""Devices in name: tensors stay on the CPU, and each has the name of a device, such as cpu:1.

A function whose tensors have different names raises, as it does on real devices: only a number may
be on the host, and indices in brackets.
"""

from collections.abc import Iterator
from typing import Any, cast

import accelerate
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.models.hf.spreading import num_bytes

HOST = torch.device("cpu")


class NamedDevices(TorchFunctionMode):
    """Within this context, tensors are on the device that they were created on or moved to."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return device_of(args[0])
        if func == torch.Tensor.data.__set__:
            args[0]._named = device_of(args[1])
            return func(*args)
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return _moved(func, *args, **kwargs)
        inputs = list(_tensors([args, kwargs]))
        device = kwargs.get("device")
        if device is None:
            device = _common_device(func, args, inputs)
        elif (device := torch.device(device)).type != "meta":
            kwargs["device"] = HOST
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if not any(tensor is each for each in inputs):
                tensor._named = device
        return result


def device_of(tensor: Any) -> torch.device:
    """The name of a tensor's device."""
    return tensor.device if tensor.is_meta else getattr(tensor, "_named", HOST)


def put(hf: nn.Module, devices: dict[str, str]) -> None:
    """Give the weights and buffers of each named part the name of its device."""
    for name, tensor in [*hf.named_parameters(), *hf.named_buffers()]:
        found: Any = tensor
        part = max((part for part in devices if f"{name}.".startswith(f"{part}.")), key=len)
        found._named = torch.device(devices[part])


def _moved(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if func is torch.Tensor.cpu:
        device, dtype = HOST, None
    elif args and isinstance(args[0], Tensor):
        device, dtype = device_of(args[0]), args[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    moved = tensor if dtype is None else tensor.to(dtype)
    device = device_of(tensor) if device is None else device
    if moved is tensor and device != device_of(tensor):
        moved = tensor.clone()
    if moved is not tensor:
        moved._named = device
    return moved


def _common_device(func: Any, args: tuple[Any, ...], inputs: list[Any]) -> torch.device:
    """The device of all inputs, but for numbers and indices on the host."""
    if func in (torch.Tensor.copy_, torch._has_compatible_shallow_copy_type):
        return device_of(args[0])
    if func is torch.Tensor.__deepcopy__:  # its memo has tensors, too
        return device_of(args[0])
    indexed = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
    indices = {id(x) for x in _tensors(args[1])} if indexed else set()
    free = {id(x) for x in inputs if x.ndim == 0} | indices
    found = {device_of(x) for x in inputs if device_of(x) != HOST or id(x) not in free}
    if len(found) > 1:
        raise RuntimeError(f"{func.__name__} got tensors on {sorted(map(str, found))}")
    return found.pop() if found else HOST


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def spread(hf: Any, cards: dict[str, int], names: tuple[str, str] = ("cuda:0", "cuda:1")) -> Any:
    """Dispatch a model by accelerate; it fails if it is moved or copied."""
    devices = {name: names[card] for name, card in cards.items()}
    put(hf, devices)
    first, skipped = cast("Any", names[0]), hf._skip_keys_device_placement
    accelerate.dispatch_model(hf, cast("Any", devices), first, skip_keys=skipped)

    def refuse(*_: object) -> None:
        raise AssertionError("a spread model is not moved or copied")

    hf.to = hf.__deepcopy__ = refuse
    return hf


def halves(hf: Any) -> dict[str, int]:
    """A map as device_map="auto" makes it, over two cards, the first too small for the model."""
    size = num_bytes(hf, torch.float32)
    rooms: Any = {0: int(0.75 * size), 1: 2 * size}
    found: Any = accelerate.infer_auto_device_map(
        hf, rooms, no_split_module_classes=[*hf._no_split_modules]
    )
    assert set(found.values()) == {0, 1}
    return found
