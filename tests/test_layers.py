"""The import table: which part of dakrun may import which, read from the source with `ast`.

Imports inside functions, under TYPE_CHECKING and through `import_module("...")` count as well. Two
exemptions, both for type checkers alone: dakrun/__init__.py names the Python API, which lies above
it, and imports it when it is asked for (tests/test_api.py); parts that start without torch may name
its types.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Top to bottom; a part (a module or folder of dakrun) imports from its own layer and below.
LAYERS = (
    ("cli", "__main__"),
    ("lab", "ray"),
    ("demo", "report", "llm", "generate"),
    ("doctor", "engine"),
    ("nn", "requests"),
    ("weights",),
    ("kernels",),
    ("memory", "plan"),
    ("launches",),
    ("hardware", "models"),
    ("config",),
    ("drafts", "formats", "grammars"),
    ("errors", "geometry", "units", "resources", "interrupt", "tables", "terminal", "__init__"),
)
DEPTH = {part: depth for depth, layer in enumerate(LAYERS) for part in layer}

# Downward or sideways, and refused all the same: (part, what it may not import).
REFUSED = {
    ("plan", "memory"): "planning allocates nothing",
    ("kernels", "plan"): "kernels see pointers, shapes and configs, never plans",
}

# Planning needs no GPU and starts at once: these parts and modules load none of HEAVY.
LIGHT_PARTS = {"plan", "hardware", "config", "formats", "errors", "geometry", "units", "resources"}
LIGHT_PARTS |= {"launches", "grammars", "__init__"}
LATE_PARTS = {"formats"}  # whose functions may import torch when they are called
LIGHT_MODULES = {
    "dakrun.memory.limits",
    *(
        f"dakrun.models.{name}"
        for name in (
            *("__init__", "decoder", "experts", "families", "files", "glm4_moe", "hf_config"),
            *("hf_fields", "hf_mixture", "hf_rope", "hub", "known", "known_mixtures", "llama"),
            *("mixtral", "modules", "olmoe", "operands", "opt", "phi3", "popularity"),
            *("quantization", "qwen3", "qwen3_moe"),
        )
    ),
}
HEAVY = {"torch", "transformers", "cupy"}

# Only these touch CuPy or the driver.
DRIVER_MODULES = {f"dakrun.kernels.runtime.{name}" for name in ("copy_engine", "graph", "jit")}
DRIVER_MODULES |= {f"dakrun.kernels.runtime.{name}" for name in ("nvrtc", "tensor_map")}
DRIVER_MODULES |= {"dakrun.memory.device", "dakrun.memory.host"}
DRIVER = {"cupy", "cupyx", "cupy_backends", "cuda"}


def module_name(path: Path) -> str:
    """dakrun/plan/ops.py -> dakrun.plan.ops, dakrun/plan/__init__.py -> dakrun.plan.__init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def part_of(module: str) -> str:
    """The part a dotted name under dakrun belongs to; the package itself is `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def is_light(module: str) -> bool:
    """Whether `module` may load none of HEAVY."""
    return part_of(module) in LIGHT_PARTS or module in LIGHT_MODULES


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `source`, the text of `module`, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level]
                base = ".".join([*above, base]) if base else ".".join(above)
            for alias in node.names:
                # `from dakrun import x`: x is a part, or else an attribute of the package.
                attribute = base == "dakrun" and alias.name not in DEPTH
                yield node.lineno, base if attribute else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def for_type_checkers(source: str) -> set[int]:
    """The lines of `source` that stand under `if TYPE_CHECKING:`."""
    blocks = [
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {statement.lineno for block in blocks for statement in block}


def violations(source: str, module: str) -> list[str]:
    """What in `source`, the text of `module`, breaks the table: one line each."""
    part = part_of(module)
    if part not in DEPTH:
        return [f"{module}: `{part}` is in no layer; add it to LAYERS in tests/test_layers.py"]
    found = []
    unimported = for_type_checkers(source)
    for line, target in imports(source, module):
        if line in unimported and module == "dakrun.__init__":
            continue
        where = f"{module}:{line}: imports {target}"
        top = target.partition(".")[0]
        if top in DRIVER and module not in DRIVER_MODULES:
            found.append(f"{where}, which only {' and '.join(sorted(DRIVER_MODULES))} may")
        elif (
            top in HEAVY and is_light(module) and part not in LATE_PARTS and line not in unimported
        ):
            found.append(f"{where}, but `{module}` has to start without {top}")
        elif top == "dakrun":
            below = part_of(target)
            if below not in DEPTH:
                found.append(f"{where}, which is in no layer of tests/test_layers.py")
            elif DEPTH[below] < DEPTH[part]:
                found.append(f"{where}, but `{part}` is below `{below}`")
            elif (part, below) in REFUSED:
                found.append(f"{where}: {REFUSED[part, below]}")
    return found


MODULES = {module_name(path): path for path in sorted((ROOT / "dakrun").rglob("*.py"))}


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module: str) -> None:
    found = violations(MODULES[module].read_text(encoding="utf-8"), module)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("dakrun.plan.ops", "import dakrun.engine.graph", "`plan` is below `engine`"),
        ("dakrun.plan.ops", "from ..engine import graph", "`plan` is below `engine`"),
        ("dakrun.plan.__init__", "from ..nn import SplitKGEMM", "`plan` is below `nn`"),
        ("dakrun.config", "from . import plan", "`config` is below `plan`"),
        ("dakrun.config", "from dakrun import cli", "`config` is below `cli`"),
        ("dakrun.units", "def f():\n    from dakrun.config import x", "units:2: imports"),
        ("dakrun.nn", "importlib.import_module('dakrun.llm')", "`nn` is below `llm`"),
        ("dakrun.plan.ops", "from dakrun import memory", "planning allocates nothing"),
        ("dakrun.kernels.gemm.splitk", "from dakrun.plan.planner import Plan", "never plans"),
        ("dakrun.plan.ops", "import torch.nn as nn", "without torch"),
        ("dakrun.models.llama", "import torch", "without torch"),
        ("dakrun.hardware.profile", "from transformers import AutoConfig", "without transformers"),
        ("dakrun.plan.ops", "import cupy", "which only dakrun."),
        ("dakrun.kernels.gemm.splitk", "from cuda.bindings import nvrtc", "memory.host may"),
        ("dakrun.__init__", "from dakrun.llm import LLM", "`__init__` is below `llm`"),
        ("dakrun.__init__", "def f():\n    import dakrun.llm", "`__init__` is below `llm`"),
        ("dakrun.units", "if TYPE_CHECKING:\n    import dakrun.llm", "`units` is below `llm`"),
        ("dakrun.novelty", "", "add it to LAYERS"),
        ("dakrun.cli.main", "import dakrun.novelty", "in no layer"),
    ],
)
def test_a_violation_is_found(module: str, source: str, message: str) -> None:
    (found,) = violations(source, module)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dakrun.cli.main", "from dakrun import __version__\nfrom dakrun import plan, llm"),
        ("dakrun.plan.ops", "import math\nfrom . import roofline\nfrom ..config import Workload"),
        ("dakrun.plan.__init__", "from .ops import Op\nfrom .. import config"),
        ("dakrun.kernels.runtime.jit", "import cupy\nfrom cuda.bindings import nvrtc"),
        ("dakrun.formats.rows", "def f():\n    import torch"),
        ("dakrun.memory.host", "import torch, cupy\nfrom dakrun.errors import CannotRun"),
        ("dakrun.weights.checkpoint", "from dakrun.plan.planner import Plan"),
        ("dakrun.kernels.runtime.nvrtc", "from cuda.bindings import nvrtc"),
        ("dakrun.lab.probe.gpu", "from dakrun import memory"),
        ("dakrun.__init__", "if TYPE_CHECKING:\n    from dakrun.llm import LLM"),
        ("dakrun.models.decoder", "if TYPE_CHECKING:\n    import torch"),
    ],
)
def test_downward_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def loaded_by(*modules: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules.keys() & {HEAVY!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_cli_and_probe_import_late() -> None:
    assert loaded_by("dakrun.cli.main", "dakrun.lab.probe", "dakrun.lab.probe.table") == []


def test_light_parts_stay_light_through_what_they_import() -> None:
    light = [name.removesuffix(".__init__") for name in MODULES if is_light(name)]
    assert loaded_by(*light) == []
