"""Kernels on the CPU: native/*.cu compiled by g++ against emulator/ptx.cuh, launched as on a GPU.

The kernel's own source and its Python wrapper run; only PTX instructions are emulated.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from compiled import kept

from dakrun.geometry import CUDA_CONSTANTS
from dakrun.kernels.gemm import AFTER_REMOTE
from dakrun.kernels.runtime.held import held_card, held_macros
from dakrun.resources import resource_dir

EMULATOR = Path(__file__).parent / "emulator"
HEADER = "ptx.cuh"
MACHINE = ("machine", "waits", "boxes", "stores")
IN_ORDER = ("route",)  # kernels whose CTAs wait for those before them, which a GPU starts first
# _FORTIFY_SOURCE aborts on jumps between stacks, by which fibers switch.
COMPILER = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE"]
# Kernels call emulator/stores.cpp before each store, but for those to a function's own variables.
REPORTS_STORES = [
    "-fsanitize=kernel-address",
    *(
        f"--param=asan-{name}=0"
        for name in ("instrumentation-with-call-threshold", "instrument-reads", "stack", "globals")
    ),
    "-fno-sanitize-address-use-after-scope",
]
# The emulator's operator new is for nobody else.
EXPORTS = """{ global: launch; __asan_*; extern "C++" { emulator::*; }; local: *; };"""
ENTRY = """
#include "{source}"
#include "stores.cuh"

extern "C" void launch(const void* args, int size, int grid, int cluster, int together, int block,
                       int shared, uint32_t seed, bool complete, bool pdl, char* problem) {{
  {struct} own;
  // ctypes does not pad a structure to the alignment of its fields.
  const int whole = sizeof own, least = whole - static_cast<int>(alignof({struct}));
  if (size > whole || size <= least) {{
    std::strncpy(problem, "arguments of another size than the kernel's", 255);
    return;
  }}
  std::memcpy(&own, args, size);
  for (int i = 0; i < grid && !*problem; i += together) {{
    std::vector<uint32_t> indices;
    for (int cta = i; cta < std::min(grid, i + together); cta++)
      indices.push_back(seed % 2 ? grid - 1 - cta : cta);
    const std::string found = emulator::run(indices, cluster, block, shared, seed + i, complete,
                                            pdl, [&own] {{ {name}(own); }});
    std::strncpy(problem, found.c_str(), 255);
  }}
}}
"""


class EmulatedKernel:
    """The kernel `name` of `source` with an argument of type `struct`, built in `folder`."""

    def __init__(
        self, source: str, name: str, struct: str, defines: dict[str, int], folder: Path
    ) -> None:
        entry = ENTRY.format(source=source, struct=struct, name=name)
        macros = [f"-D{key}={value}" for key, value in {**CUDA_CONSTANTS, **defines}.items()]
        library = folder / "kernel.so"

        def compile_it() -> bytes:
            for path, text in sources().items():
                (folder / path).write_text(text, "utf-8")
            (folder / "entry.cpp").write_text(entry, "utf-8")
            header = f"{_precompiled().name}/{HEADER}"
            source = folder / "entry.cpp"
            _link("-include", header, *REPORTS_STORES, *macros, source, to=library)
            return library.read_bytes()

        _load_machine()
        library.write_bytes(kept([*_emulator(), *sources().values(), entry, *macros], compile_it))
        self._launch = ctypes.CDLL(str(library)).launch
        self._in_order = name in IN_ORDER
        self.seed = 0  # odd ones start the last CTAs first, where they can
        self.together = 1  # clusters that run concurrently

    def launch(
        self,
        grid: int,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        """Launch as runtime.Kernel does. AssertionError for an error in some interleaving.

        Also if the launch claims more than the card has to which launches are held.
        """
        if card := held_card():
            assert shared_bytes <= card.lone_ring_bytes, f"{shared_bytes} bytes of shared memory"
            assert cluster <= card.max_cluster, f"clusters of {cluster}"
        assert grid > 0 and grid % cluster == 0, f"{grid} CTAs in clusters of {cluster}"
        complete = getattr(args, "order", 0) == AFTER_REMOTE
        problem = ctypes.create_string_buffer(256)
        seed = self.seed << self._in_order
        self._launch(
            ctypes.byref(args), ctypes.sizeof(args), grid, cluster, cluster * self.together, block,
            shared_bytes, ctypes.c_uint32(seed), complete, pdl,
            problem,
        )  # fmt: skip
        assert not problem.value, problem.value.decode()


def atoms_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box_rows: int, box_atoms: int
) -> tuple[int, ...]:
    """tensor_map.atoms_map in the emulator's encoding."""
    del dtype  # both are 16-bit
    return (address, *shape, box_rows, box_atoms, *[0] * 11)


def boxes_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box: tuple[int, int]
) -> tuple[int, ...]:
    """tensor_map.boxes_map in the emulator's encoding."""
    del dtype
    return (address, *shape, *box, *[0] * 11)


def of_name(folder: Callable[[], Path]) -> Callable[..., EmulatedKernel]:
    """A stand-in for runtime.jit.kernel that builds each variant once, in a new `folder`.

    A card to which launches are held adds its macros, as there.

    The argument of a kernel `twice_two` is a struct TwiceTwoArgs; "splitk" counts as split_k.
    """

    @functools.cache
    def build(source: str, name: str, macros: tuple[tuple[str, int], ...]) -> EmulatedKernel:
        struct = name.replace("splitk", "split_k").title().replace("_", "") + "Args"
        return EmulatedKernel(source, name, struct, dict(macros), folder())

    def kernel(source: str, name: str, defines: dict[str, int] | None = None) -> EmulatedKernel:
        return build(source, name, tuple({**held_macros(), **(defines or {})}.items()))

    return kernel


def _compile(*arguments: str | Path, to: Path) -> None:
    subprocess.run([*COMPILER, f"-I{EMULATOR}", *arguments, "-o", to], check=True)


def _link(*arguments: str | Path, to: Path) -> None:
    exports = to.with_suffix(".exports")
    exports.write_text(EXPORTS, "utf-8")
    _compile("-shared", f"-Wl,--version-script={exports}", *arguments, to=to)


@functools.cache
def _precompiled() -> tempfile.TemporaryDirectory[str]:
    """A folder with the emulator's header precompiled; it is removed when the process ends.

    That halves a kernel's compile time.
    """
    folder = tempfile.TemporaryDirectory()
    header = Path(folder.name, f"{HEADER}.gch")
    _compile("-x", "c++-header", *REPORTS_STORES, EMULATOR / HEADER, to=header)
    return folder


@functools.cache
def _load_machine() -> None:
    """Compile and load the machine, which all kernels call."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "machine.so")

        def compile_it() -> bytes:
            _link("-O2", *(EMULATOR / f"{name}.cpp" for name in MACHINE), to=library)
            return library.read_bytes()

        library.write_bytes(kept([*_emulator(), "machine"], compile_it))
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _emulator() -> tuple[str, ...]:
    """The compiler's version and options, and the emulator's sources."""
    version = subprocess.run([*COMPILER[:1], "--version"], check=True, capture_output=True).stdout
    texts = (path.read_text("utf-8") for path in sorted(EMULATOR.iterdir()) if path.is_file())
    return (version.decode(), *COMPILER[1:], *REPORTS_STORES, EXPORTS, *texts)


@functools.cache
def sources() -> dict[str, str]:
    """Files of native/ by name, for the host, but for those that the emulator replaces."""
    return {
        path.name: _for_the_host(path.read_text("utf-8"))
        for path in sorted(resource_dir("native").iterdir())
        if path.suffix in (".cu", ".cuh") and not (EMULATOR / path.name).exists()
    }


def _for_the_host(source: str) -> str:
    """Replace declarations of shared memory, dynamic and of fixed size, by the running CTA's."""
    dynamic = "extern __shared__ __align__(1024) uint8_t smem[];"
    source = source.replace(dynamic, "#define smem (emulator::cta->memory.data())")
    # The key of an array of fixed size is a static of the function that declares it.
    return re.sub(
        r"  __shared__ (\S+) (\w+)(.*);",
        r"  static const char key_of_\2 = 0;\n  using type_of_\2 = \1\3;\n"
        r"  auto& \2 = emulator::fixed<type_of_\2>(&key_of_\2);",
        source,
    )
