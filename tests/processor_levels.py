"""Compiler flags that leave out instructions of this processor, by level."""

import platform

_WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
_WITHOUT_512 = (
    *("-mno-avx512" + part for part in ("f", "bw", "dq", "vl", "cd", "bf16", "fp16", "vnni")),
    *("-mno-avx512" + part for part in ("vbmi", "vbmi2", "ifma", "bitalg", "vpopcntdq")),
)

LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "native": (),
    "avx512_bf16": (*_WITHOUT_TILES, "-mno-avx512fp16"),
    "avx512": (*_WITHOUT_TILES, "-mno-avx512fp16", "-mno-avx512bf16"),
    "avx2": (*_WITHOUT_TILES, *_WITHOUT_512, "-mno-avxvnni"),
    "sse2": (*_WITHOUT_TILES, *_WITHOUT_512, "-mno-avxvnni", "-mno-avx2", "-mno-avx", "-Wno-psabi"),
}
if platform.machine() not in ("x86_64", "AMD64"):
    LEVEL_FLAGS = {"native": ()}
