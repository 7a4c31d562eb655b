"""Elements of 4 or 8 bits in units, as the kernels read them: their order, and what codes mean.

A unit is 8 rows x 128 columns with its scales, in one piece: a row block of a matrix is its units
along K, and moves with its scales. A checkpoint's format makes of its tensors what `write` takes.

    unit:   atom of columns 0 to 63 | atom of columns 64 to 127 | scales | zeros | factors
    atom:   [lane of a warp][bits * 2 bytes]           lane 4g + t has columns of row g
    scales: [8 rows][groups of the unit]               of 1, 2 or 4 bytes; zeros: int16 likewise
    factors: [8 rows] float32                          with scales of 1 byte

A scale of e4m3 is negative if its group has a code that is NaN, so that products need not look at
each code; a scale that is stored as a negative number has its sign in the codes.

The order in an atom is that of the fragments of both mma.m16n8k16 and wgmma whose operand A lies in
registers: lane 4g + t has, for each 16 columns, 2t, 2t + 1, 2t + 8 and 2t + 9 of row g. Elements of
4 bits are 32-bit words for 32 columns each, which have nibbles 0 to 3 for columns 2t, 2t + 8,
2t + 16 and 2t + 24, and nibbles 4 to 7 for the columns behind these. Elements of 8 bits are words
for 16 columns each: bytes 2t, 2t + 8, 2t + 1, 2t + 9. So a word, shifted and masked, has both
columns of a pair where a register's two 16-bit floats have their lowest bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dakrun.formats.split import Split, load_atoms, store_atoms
from dakrun.formats.weight_format import Array, WeightFormat
from dakrun.geometry import CHUNK, ROWS_PER_BLOCK, UNIT_ATOMS, UNIT_COLS, row_block_count
from dakrun.units import ceil_div

if TYPE_CHECKING:
    import torch

Code = Literal["int4", "int8", "e2m1", "e4m3"]
CODES: tuple[Code, ...] = ("int4", "int8", "e2m1", "e4m3")
GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Quantised(WeightFormat):
    """Elements (code - zero) * scale, or (code - zero) * (scale * factor): float32, rounded once.

    Codes are unsigned integers, with "int4" of 4 bits and with "int8" of 8, or floats: e2m1 of 4
    bits, e4m3 of 8, whose code 0x7F is NaN. A scale is for `group` columns of a row. It has the
    products' dtype (`scale_bytes` is 2), or is float32 (4), or with e2m1 e4m3 (1), with a float32
    factor for the row. Integers without `zeros` have the zero 8, or 128; floats have none.
    """

    code: Code
    group: int
    scale_bytes: int = 2
    zeros: bool = False
    for_kernels = True

    def __post_init__(self) -> None:
        if (
            self.code not in CODES
            or self.group not in GROUPS
            or self.scale_bytes not in (1, 2, 4)
            or (self.scale_bytes == 1) != (self.code == "e2m1")
            or (self.code == "e2m1" and self.group > 64)
            or (self.zeros and self.code not in ("int4", "int8"))
        ):
            raise ValueError(f"there is no layout for {self}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """Code and group, for reports."""
        return f"{self.code}, a scale per {self.group}" + (" with zeros" if self.zeros else "")

    @property
    def kind(self) -> str:
        """What products cost by: "int4", or with zeros "int4_zeros", "e2m1" or "eight_bits"."""
        if self.bits == 8:
            return "eight_bits"
        return f"{self.code}_zeros" if self.zeros else self.code

    @property
    def macros(self) -> dict[str, int]:  # type: ignore[override]
        """Macros of native/units.cuh."""
        return {
            "CODE": 1 + CODES.index(self.code),
            "GROUP": self.group,
            "SCALE_BYTES": self.scale_bytes,
            "ZEROS": int(self.zeros),
        }

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.code in ("int4", "e2m1") else 8

    @property
    def unit_groups(self) -> int:
        """Scales of a row in a unit."""
        return UNIT_COLS // self.group

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, a multiple of 16."""
        return sum(self._sections)

    @property
    def _sections(self) -> tuple[int, int, int, int]:
        """Bytes of elements, scales, zeros and factors of a unit."""
        scales = ROWS_PER_BLOCK * self.unit_groups
        return (
            ROWS_PER_BLOCK * UNIT_COLS * self.bits // 8,
            scales * self.scale_bytes,
            2 * scales if self.zeros else 0,
            4 * ROWS_PER_BLOCK if self.scale_bytes == 1 else 0,
        )

    @property
    def atom_bytes(self) -> int:  # type: ignore[override]
        """Bytes of 64 columns of a row block: half a unit."""
        return self.unit_bytes // UNIT_ATOMS

    @property
    def packed(self) -> WeightFormat:
        """This format."""
        return self

    def arrays(self, cols: int) -> tuple[Array, ...]:
        """One array of units."""
        return (Array("elements", self.unit_bytes * ceil_div(cols, UNIT_COLS), 16, padded=True),)

    def takes(self, cols: int) -> bool:
        """Columns in multiples of CHUNK; a row's last group may be smaller."""
        return cols % CHUNK == 0

    def write(
        self, arrays: "Sequence[torch.Tensor]", split: Split, first: int, *stored: "torch.Tensor"
    ) -> None:
        """Pack `stored`: codes [R, K] as uint8, scales [R, groups], then what the format has.

        That is zeros as integers [R, groups], or factors as float32 [R].
        """
        store_atoms(arrays[0], split, first, self._packed(*stored), UNIT_COLS)

    def read(
        self, arrays: "Sequence[torch.Tensor]", split: Split, cols: int, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """The rows [row blocks * 8, K] of a tier in `dtype`."""
        import torch

        units = ceil_div(cols, UNIT_COLS)
        if not split.row_blocks:
            return arrays[0].new_empty((0, cols), dtype=dtype)
        like = arrays[0].new_empty((units, 0, self.unit_bytes))
        codes, scales, zeros, factors = self.unpacked(load_atoms(arrays[0], split, like, UNIT_COLS))
        if self.scale_bytes == 1:
            wide = scales.view(torch.float8_e4m3fn).float() * factors
        else:
            wide = scales.view(torch.float32 if self.scale_bytes == 4 else dtype).float()
        values = decoded(codes, self.code)
        values = values.view(len(codes), -1, self.group) - zeros[:, :, None]
        return (values * wide[:, :, None]).flatten(1)[:, :cols].to(dtype)

    def _packed(
        self,
        codes: "torch.Tensor",
        scales: "torch.Tensor",
        more: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Units [units, row blocks, unit bytes] of rows [R, K]; padding is zero, scales too."""
        import torch

        if self.code == "e4m3":
            codes, scales = _marked(codes, scales, self.group)
        height, cols = codes.shape
        blocks, units = row_block_count(height), ceil_div(cols, UNIT_COLS)

        def of_rows(tensor: torch.Tensor, per_unit: int) -> torch.Tensor:
            """Pad [R, n] to [row blocks, 8, units, per_unit]."""
            whole = tensor.new_zeros(blocks * ROWS_PER_BLOCK, units * per_unit)
            whole[:height, : tensor.shape[1]] = tensor
            return whole.view(blocks, ROWS_PER_BLOCK, units, per_unit)

        def section(tensor: torch.Tensor) -> torch.Tensor:
            """[row blocks, 8, units, n] as bytes [units, row blocks, ...]."""
            return tensor.permute(2, 0, 1, 3).contiguous().view(torch.uint8).flatten(2)

        # [row blocks, g, units, atoms, 16 columns of an atom, h, t, j]: column 16 s + 8 h + 2 t + j
        every = of_rows(codes, UNIT_COLS).view(blocks, 8, units, UNIT_ATOMS, 4, 2, 4, 2)
        # [units, row blocks, atoms, g, t, 16 columns, j, h]
        every = every.permute(2, 0, 3, 1, 6, 4, 7, 5)
        if self.bits == 4:
            # Words of two 16 columns each: [..., word, j, s % 2, h], nibble 4 j + 2 (s % 2) + h.
            nibbles = every.unflatten(5, (2, 2)).transpose(6, 7).flatten(-3)
            every = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        sections = [every.reshape(units, blocks, -1)]
        if self.scale_bytes == 2 and scales.element_size() != 2:
            raise ValueError(f"expected scales of 16 bits, got {scales.dtype}")
        if self.scale_bytes == 4:
            scales = scales.float()
        as_bytes = scales.contiguous().view(torch.uint8).view(height, -1)
        sections.append(section(of_rows(as_bytes, self.unit_groups * self.scale_bytes)))
        if self.zeros and more is not None:
            sections.append(section(of_rows(more.to(torch.int16), self.unit_groups)))
        if self.scale_bytes == 1 and more is not None:
            factors = more.float()[:, None].expand(-1, units)
            sections.append(section(of_rows(factors, 1)))
        return torch.cat(sections, 2)

    def unpacked(
        self, units: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
        """Rows of units [units, row blocks, unit bytes]: the reverse of packing.

        Codes as uint8 [R, K] and, for all groups [R, K / group], scales as bytes in the last
        dimension, zeros and factors as float32.
        """
        import torch

        count, blocks, _ = units.shape
        elements, scales, zeros, factors = units.split(self._sections, 2)

        def rows(section: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            """Bytes [units, row blocks, ...] as [R, n] of `dtype`."""
            section = section.reshape(count, blocks, ROWS_PER_BLOCK, -1).permute(1, 2, 0, 3)
            return section.reshape(blocks * ROWS_PER_BLOCK, -1).view(dtype)

        if self.bits == 4:
            both = torch.stack((elements & 15, elements >> 4), -1)
            every = both.view(count, blocks, UNIT_ATOMS, 8, 4, 2, 2, 2, 2).transpose(6, 7)
            every = every.flatten(5, 6)
        else:
            every = elements.view(count, blocks, UNIT_ATOMS, 8, 4, 4, 2, 2)
        every = every.permute(1, 3, 0, 2, 5, 7, 4, 6)  # as in _packed
        codes = every.reshape(blocks * ROWS_PER_BLOCK, count * UNIT_COLS)
        groups = codes.shape[1] // self.group
        none = {"int4": 8.0, "int8": 128.0}.get(self.code, 0.0)
        zero = torch.full((len(codes), groups), none, device=units.device)
        factor = torch.ones_like(zero)
        if self.zeros:
            zero = rows(zeros, torch.int16).float()
        if self.scale_bytes == 1:
            factor = rows(factors, torch.float32).repeat_interleave(self.unit_groups, 1)
        of_rows = rows(scales, torch.uint8)
        if self.code == "e4m3":
            of_rows[:, self.scale_bytes - 1 :: self.scale_bytes] &= 0x7F
        return codes, of_rows, zero, factor


def _marked(
    codes: "torch.Tensor", scales: "torch.Tensor", group: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Codes and scales of e4m3 as units have them: negative scales mark groups with NaN."""
    import torch

    height, cols = codes.shape
    groups = torch.nn.functional.pad(codes, (0, -cols % group)).view(height, -1, group)
    nan = (groups & 0x7F).amax(2) == 0x7F
    negative = scales.signbit()
    if bool(negative.any()):
        groups = groups ^ (negative[:, :, None].to(torch.uint8) << 7)
        codes = groups.view(height, -1)[:, :cols]
    sizes = scales.abs()
    return codes, torch.where(nan, -sizes, sizes)


def decoded(codes: "torch.Tensor", code: Code) -> "torch.Tensor":
    """The values of codes as float32, before zeros and scales."""
    import torch

    if code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if code == "e2m1":
        sizes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=codes.device)
        return torch.where(codes < 8, 1.0, -1.0) * sizes[(codes & 7).long()]
    return codes.float()
