"""Products as float64 has them, for every library that this processor can use."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models.llama.cpu_weights import round_rows
from paceline.native import compiled
from paceline.native.library import library_with
from paceline.native.structures import Matrix
from support.processes import LEVEL_FLAGS

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")

SHAPES = [(16, 16), (32, 48), (61, 64), (33, 80), (96, 576), (12, 1536)]
ROUNDING = 2.0**-24  # of a number in float32
COUNTS = [1, 2, 5, 6, 8, 10, 11, 16, 21, 33, 64]


@pytest.fixture(params=LEVEL_FLAGS)
def library(request: pytest.FixtureRequest) -> Any:
    """The library of this processor, and those of processors with fewer instructions."""
    made = library_with(LEVEL_FLAGS[request.param])
    letters = {"i": ctypes.c_int64, "p": ctypes.c_void_p}
    for name, arguments in {
        "operand_size": "ii",
        "lay_out": "ppiip",
        "multiply": "pppiipipii",
        "gated": "piipip",
        "begin_products": "p",
        "end_products": "p",
    }.items():
        function = getattr(made, name)
        function.argtypes = [letters[letter] for letter in arguments]
        function.restype = ctypes.c_int64 if name == "operand_size" else None
    return made


class Products:
    """A matrix packed by the library, and its products."""

    def __init__(
        self, library: Any, weight: Tensor, scales: Tensor | None = None, *, rounds: bool = False
    ) -> None:
        self.compiled = library
        self.rows, self.size = weight.shape
        sizes = (self.rows, self.size, weight.element_size())
        self.held = torch.empty(library.packed_size(*sizes), dtype=torch.uint8), scales
        library.pack(weight.data_ptr(), *sizes, self.held[0].data_ptr())
        pointer = None if scales is None else scales.data_ptr()
        self.matrix = Matrix(self.held[0].data_ptr(), pointer, rounds)

    def _call(self, name: str, x: Tensor, *arguments: Any, behind: tuple[Any, ...]) -> None:
        count = len(x)
        operand = torch.full((self.compiled.operand_size(self.size, count),), torch.nan)
        others, matrix = ctypes.create_string_buffer(64), ctypes.byref(self.matrix)
        self.compiled.begin_products(others)
        self.compiled.lay_out(matrix, x.data_ptr(), self.size, count, operand.data_ptr())
        getattr(self.compiled, name)(
            matrix, *arguments, self.size, operand.data_ptr(), count, *behind
        )
        self.compiled.end_products(others)

    def of(
        self,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        places: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[tokens, rows]; added to `out` where there is one, with room behind the rows."""
        add = out is not None
        out = torch.zeros(len(x), self.rows + 3) if out is None else out
        pointers = [None if t is None else t.data_ptr() for t in (bias, places)]
        behind = (out.data_ptr(), out.shape[1], int(add))
        self._call("multiply", x, *pointers, self.rows, behind=behind)
        return out

    def gated(self, x: Tensor) -> Tensor:
        act = torch.zeros(len(x), self.rows // 2)
        self._call("gated", x, self.rows // 2, behind=(act.data_ptr(),))
        return act


def vectors(count: int, size: int) -> Tensor:
    """Some entries a thousand times as large as others, as the activations of language models."""
    generator = torch.Generator().manual_seed(size + count)
    x = torch.randn(count, size, generator=generator)
    x[:, ::7] *= 1000
    return x


def weights(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


def matrices(library: Any, weight: Tensor) -> list[tuple[Products, Tensor]]:
    """In bfloat16 and in 8 bits, each with what it stands for in float64."""
    numbers, scales = round_rows(weight)
    return [
        (Products(library, weight.bfloat16()), weight.bfloat16().double()),
        (Products(library, numbers, scales), numbers.double() * scales.double()[:, None]),
    ]


def largest_error(got: Tensor, x: Tensor, weight: Tensor, *, fixed_point: bool) -> float:
    """In roundings of float32 of what was added up; an entry's place may hang on the largest."""
    wanted = x.double() @ weight.T
    allowed = x.double().abs() @ weight.abs().T
    if fixed_point:
        allowed += x.double().abs().amax(1, keepdim=True) * weight.abs().sum(1)
    return float(((got - wanted).abs() / allowed).max()) / ROUNDING


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_products_are_those_of_float32(library: Any, rows: int, size: int):
    for (products, weight), is_int8 in zip(
        matrices(library, weights(rows, size)), (False, True), strict=True
    ):
        for count in COUNTS:
            x = vectors(count, size)
            got = products.of(x)
            assert largest_error(got[:, :rows], x, weight, fixed_point=is_int8) < 6
            assert not got[:, rows:].any(), "written behind the rows"


def test_entries_of_16_bits_would_be_seen():
    x, weight = vectors(4, 64), weights(16, 64).double()
    cut = (x.view(torch.int32) & -(1 << 8)).view(torch.float32).double()
    assert largest_error(cut @ weight.T, x, weight, fixed_point=True) > 6


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_vectors_are_rounded_where_that_is_faster_and_asked_for(library: Any, rows: int, size: int):
    weight = weights(rows, size).bfloat16()
    products = Products(library, weight, rounds=True)
    has_tiles = library.most_tokens(1) > library.most_tokens(0)
    for count in COUNTS:
        x = vectors(count, size)
        got = products.of(x)[:, :rows]
        rounded = x.bfloat16().float() if has_tiles else x
        assert largest_error(got, rounded, weight.double(), fixed_point=False) < 6
        alone = torch.cat([products.of(row[None].contiguous())[:, :rows] for row in x[:3]])
        assert torch.equal(got[:3], alone)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_token_has_the_same_products_to_the_bit_in_any_company(
    library: Any, rows: int, size: int
):
    for products, _ in matrices(library, weights(rows, size)):
        x = vectors(64, size)
        alone = torch.cat([products.of(row[None].contiguous()) for row in x])
        for count in COUNTS:
            assert torch.equal(products.of(x[:count].contiguous()), alone[:count]), count


def test_biases_places_and_sums_so_far(library: Any):
    rows, size, count = 37, 48, 7
    bias, places = torch.arange(rows) / 8.0, torch.randperm(rows + 3)[:rows].contiguous()
    x = vectors(count, size)
    for products, _ in matrices(library, weights(rows, size)):
        plain = products.of(x)[:, :rows]
        torch.testing.assert_close(products.of(x, bias=bias)[:, :rows], plain + bias)
        assert torch.equal(products.of(x, places=places)[:, places], plain)
        before = torch.ones(count, rows + 3)
        after = products.of(x, out=before.clone())
        assert torch.equal(after[:, :rows], plain + 1)
        assert torch.equal(after[:, rows:], before[:, rows:])


def test_gates(library: Any):
    inner, size = 48, 80
    for products, weight in matrices(library, weights(2 * inner, size) / 100):
        for count in (1, 3, 11):
            x = vectors(count, size)
            gate, up = (x.double() @ weight.T).chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
            close = 1e-5 * float(wanted.abs().max())
            torch.testing.assert_close(products.gated(x).double(), wanted, rtol=0, atol=close)


def test_what_is_no_number_stays_none_and_touches_no_other_token(library: Any):
    for products, _ in matrices(library, weights(32, 64)):
        x = vectors(3, 64)
        whole = products.of(x)
        for odd in (torch.nan, torch.inf):
            x[1, 5] = odd
            got = products.of(x)[:, :32]
            assert not got[1].isfinite().any()
            assert torch.equal(got[::2], whole[::2, :32])
        assert not products.of(torch.zeros(2, 64)).any()
