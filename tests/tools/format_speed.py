"""Times products with weights of 4 and 8 bits beside those of 16 bits, and checks values.

    python tests/tools/format_speed.py --shape 4096x4096 --rows 8 --dtype bfloat16

Each format's column has the ratio of its time to that of the same product in 16 bits, by the
kernel that the engine uses for the number of rows, and the largest ratio expected; "!" marks a
larger one.
Weights are random codes and scales in the kernels' layout, all in HBM.

Times are medians of CUDA graphs. Each launch of a graph reads another weight; together the weights
have far more bytes than L2. The graphs of all formats are replayed in turns. Exit status 1: a row
of a product differs too much from the product in float64.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import click
import torch

from dakrun.formats import PACKED16, Quantised, WeightFormat
from dakrun.geometry import CHUNK, row_block_count
from dakrun.hardware import LOCAL, Card
from dakrun.kernels.gemm import splitk, tiled
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import architecture, card_of, compile_ahead
from dakrun.lab.chain import Launch, seconds_round_robin
from dakrun.launches import TierAccess, kernel_for, split_row_blocks, tiled_config, tiles_for
from dakrun.memory.matrix import MatrixPart, TieredMatrix

Shape = tuple[int, int]
FORMATS: dict[str, WeightFormat] = {
    "16 bits": PACKED16,
    "int4 g128": Quantised("int4", 128),
    "int4 zeros": Quantised("int4", 128, zeros=True),
    "int4 g32": Quantised("int4", 32),
    "nvfp4": Quantised("e2m1", 16, 1),
    "fp8 block": Quantised("e4m3", 128, 4),
    "fp8 chan.": Quantised("e4m3", 128),
    "int8": Quantised("int8", 128),
}
SHAPES = (28672, 7168), (28672, 4096), (4096, 14336), (4096, 4096)
ROWS = 1, 8, 16, 64, 512, 4096
FOUR_BITS = {(4096, 14336): 0.34, (4096, 4096): 0.40}  # bars for up to 16 rows, groups of 128
CHAIN_BYTES, LEAST_WEIGHTS = 2**30, 3  # of a chain
REPLAYS, ACCESS = 5, (TierAccess(),)
CHECKED_ROWS = 64  # of X, in equal steps: one in each tile of rows
MOST_ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of a row, over its norm
SIZES = {"int4": 5.0, "int8": 75.0, "e2m1": 3.0, "e4m3": 100.0}  # of codes


def bar(stored: WeightFormat, shape: Shape, n: int) -> float | None:
    """The largest ratio expected of a product's time to that in 16 bits; None if not set."""
    if not isinstance(stored, Quantised):
        return None
    if n > 64:
        return 1.05 if n >= 4096 else 1.10
    if n > 16:
        return 0.70 if stored.bits == 4 else None
    if stored.bits == 8:
        return 0.62 if shape == (4096, 4096) else 0.54
    more = 0.04 * (stored.group <= 32) + 0.08 * stored.zeros
    return FOUR_BITS.get(shape, 0.30) + more


@dataclass(frozen=True)
class Bench:
    """Products in `dtype` on a device, whose launches are chosen for `card`."""

    dtype: torch.dtype
    device: torch.device
    card: Card

    def weights(self, stored: WeightFormat, shape: Shape) -> Iterator[TieredMatrix]:
        """Random weights of a chain."""
        rows, cols = shape
        row_blocks, atom_bytes = row_block_count(rows), stored.atom_bytes
        (split,) = split_row_blocks([row_blocks], ACCESS, card=self.card, atom_bytes=atom_bytes)
        nbytes = row_blocks * stored.row_block_bytes(cols)
        for _ in range(max(LEAST_WEIGHTS, CHAIN_BYTES // nbytes)):
            data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            part = MatrixPart(LOCAL, split, stored, (data,))
            weight = TieredMatrix(shape, self.dtype, (part,))
            for piece in weight.pieces(2**26):
                piece.write(*self._stored(stored, piece.rows.stop - piece.rows.start, cols))
            yield weight

    def _stored(self, stored: WeightFormat, rows: int, cols: int) -> tuple[torch.Tensor, ...]:
        """What a format's write() takes: values have about the size of normal ones / sqrt(K)."""
        options = {"device": self.device}
        if not isinstance(stored, Quantised):
            return (torch.randn(rows, cols, dtype=self.dtype, **options) * cols**-0.5,)
        codes = torch.randint(1 << stored.bits, (rows, cols), dtype=torch.uint8, **options)
        if stored.code == "e4m3":
            codes[codes & 0x7F == 0x7F] = 1  # NaN
        groups = -(-cols // stored.group)
        scales = (torch.rand(rows, groups, **options) + 0.5) / (SIZES[stored.code] * cols**0.5)
        if stored.scale_bytes == 1:
            factors = (torch.rand(rows, **options) + 0.5) / 128
            return codes, (128 * scales).to(torch.float8_e4m3fn), factors
        if stored.scale_bytes == 2:
            scales = scales.to(self.dtype)
        if not stored.zeros:
            return codes, scales
        middle = 1 << stored.bits - 1
        return codes, scales, torch.randint(middle // 2, 3 * middle // 2, scales.shape, **options)

    def launch(self, weights: Sequence[TieredMatrix], x: torch.Tensor) -> Launch:
        """Launches of x [N, K] times each weight, with the looking ahead of decode steps."""
        out, products = x.new_empty(len(x), weights[0].shape[0]), Products(self.device, self.card)

        def one(number: int) -> torch.Tensor:
            ahead = products.ahead(len(x), weights[(number + 1) % len(weights)], ACCESS)
            products(x, weights[number], ACCESS, out, pdl=True, ahead=ahead)
            return out

        return one

    def check(self, name: str, weight: TieredMatrix, xs: Iterable[torch.Tensor]) -> None:
        """Raise ValueError if a row of the products differs too much from those in float64."""
        dense, most = weight.dense(self.device).double(), MOST_ERROR[self.dtype]
        for x in xs:
            launch = self.launch([weight], x)
            launch(0).fill_(torch.nan)
            found, step = launch(0), -(-len(x) // CHECKED_ROWS)
            wanted = x[::step].double() @ dense.T
            error = ((found[::step].double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()
            if not error.item() < most or not found.isfinite().all():
                raise ValueError(
                    f"{name}, {weight.shape}, {len(x)} rows: an error of {error:.2g}, at most "
                    f"{most} is expected"
                )

    def measure(self, formats: dict[str, WeightFormat], shape: Shape, rows: Sequence[int]) -> None:
        """Check, time and print a line of the table for each number of `rows` of X."""
        xs = [torch.randn(n, shape[1], dtype=self.dtype, device=self.device) for n in rows]
        weights = {}
        for name, stored in formats.items():
            weights[name] = list(self.weights(stored, shape))
            self.check(name, weights[name][-1], xs)
        for x in xs:
            chains = [(self.launch(each, x), len(each)) for each in weights.values()]
            times = seconds_round_robin(chains, replays=REPLAYS, load=len(x) > 64)
            plain, *others = map(statistics.median, times)
            line = f"{shape[0]}x{shape[1]}".ljust(12) + f"{len(x):5d} {1e6 * plain:9.2f} "
            for stored, seconds in zip(list(formats.values())[1:], others, strict=True):
                ratio, most = seconds / plain, bar(stored, shape, len(x))
                over = "!" if most is not None and ratio > most else " "
                line += f" {ratio:6.3f}{over}{'-' if most is None else format(most, '.2f'):>4}"
            click.echo(line)

    def variants(
        self, formats: Iterable[WeightFormat], shapes: Iterable[Shape], rows: Iterable[int]
    ) -> list[tuple[str, dict[str, int]]]:
        """Kernel variants of all products."""
        found = {}
        for stored, (m, k), n in itertools.product(formats, shapes, rows):
            count, options = row_block_count(m), {"card": self.card}
            options["atom_bytes"] = stored.atom_bytes
            if kernel_for(n, count, k, remote=False, **options) == "splitk":
                macros = [(splitk.SOURCE, splitk.defines(self.dtype, tiles_for(min(n, 64))))]
            else:
                launches = tiled_config(n, (count,), ACCESS, cols=k, **options).launches
                shaped = (launch.shape for launch in launches)
                macros = [(tiled.SOURCE, tiled.defines(self.dtype, of))
                          for of in shaped]  # fmt: skip
            for source, one in macros:
                found[source, *one.items(), stored] = source, {**one, **stored.macros}
        return list(found.values())


def shape(text: str) -> Shape:
    """Rows and columns of a weight, as in 4096x14336."""
    rows, cols = map(int, text.split("x"))
    if rows < 1 or cols < 1 or cols % CHUNK:
        raise ValueError(text)
    return rows, cols


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products of each weight format.")
    parser.add_argument("--shape", type=shape, action="append", metavar="MxK")
    parser.add_argument("--rows", type=int, action="append", metavar="N", help=f"default: {ROWS}")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = parser.parse_args()
    rows, shapes = options.rows or ROWS, options.shape or SHAPES
    if not torch.cuda.is_available() or min(rows) < 1:
        parser.error("needs a CUDA GPU, and --rows from 1")
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(getattr(torch, options.dtype), device, card_of(device))
    compile_ahead(bench.variants(FORMATS.values(), shapes, rows), architecture(device.index))
    click.echo(f"{torch.cuda.get_device_name()}, {options.dtype}: time over 16 bits, and the bar")
    names = "".join(f"{name:>13}" for name in list(FORMATS)[1:])
    click.echo(f"{'shape':12} rows 16 bits us{names}")
    for size in shapes:
        try:
            bench.measure(FORMATS, size, rows)
        except ValueError as problem:
            sys.exit(f"WRONG VALUES: {problem}")


if __name__ == "__main__":
    main()
