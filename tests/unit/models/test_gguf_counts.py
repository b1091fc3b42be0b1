"""Counts in the header of a GGUF file that its bytes do not hold are one line, at once."""

import struct
from pathlib import Path

import pytest

from paceline.models.gguf import fields
from paceline.models.gguf.conversion import open_gguf
from paceline.models.inspection import read_header
from support.checkpoints import fails
from support.gguf_files import written

FILL = bytes(100_000)
UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def array(kind: int, count: int, data: bytes = FILL, name: str = "general.x") -> bytes:
    return text(name) + struct.pack("<IIQ", ARRAY, kind, count) + data


def tensor(name: str, *sizes: int, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + numbers + struct.pack("<IQ", 0, offset)


def header(num_tensors: int, num_keys: int, content: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + content


@pytest.mark.parametrize(
    "content",
    [
        *(header(0, 1, array(kind, 1 << 40)) for kind in (UINT8, UINT32, STRING, ARRAY)),
        header(0, 1, array(UINT8, 1 << 63)),
        header(0, 1, array(UINT8, len(FILL) + 1000)),
        header(0, 1, text("x") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000),
        header(0, 1 << 62, FILL),
        header(1 << 62, 0, FILL),
        header(0, 1, struct.pack("<Q", 1 << 62) + FILL),
        header(1, 0, tensor("t", 1 << 40, 1 << 40, 1 << 40) + FILL),
        header(1, 0, tensor("t", 4, offset=1 << 62) + FILL),
        header(9, 0, b"".join(tensor(f"t{i}", 20_000) for i in range(9)) + FILL),
    ],
    ids=range(13),
)
def test_a_count_beyond_the_file_is_one_line(tmp_path: Path, content: bytes):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    fails(file, "not a complete GGUF file", load=open_gguf)


def test_entries_are_counted_over_all_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(header(0, 2, array(UINT8, 9, bytes(9)) + array(UINT8, 9, FILL, "general.y")))
    monkeypatch.setattr(fields, "_MOST_ENTRIES", 20)
    open_gguf(file)
    monkeypatch.setattr(fields, "_MOST_ENTRIES", 19)
    fails(file, "more than 19 entries", load=open_gguf)


def test_layers_beyond_the_tensors_are_one_line(tmp_path: Path):
    file = with_layers(tmp_path / "m.gguf", 3_000_000_000)
    fails(file, "block_count beyond its number of tensors", load=read_header)


def with_layers(path: Path, count: int) -> Path:
    """A valid file with another block_count."""
    key = text("llama.block_count") + struct.pack("<I", UINT32)
    content = written(path).read_bytes()
    at = content.index(key) + len(key)
    path.write_bytes(content[:at] + struct.pack("<I", count) + content[at + 4 :])
    return path
