"""kernels"""

import torch


def native_bfloat16(device: torch.device) -> bool:
    """Does this hardware multiply bfloat16 itself? Where it does not, float32 is several times faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    # private, but there is no public question
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)
