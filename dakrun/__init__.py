"""dakrun: offline batch inference whose weights and KV cache lie in several memory tiers.

The names of the Python API are imported when they are first used: LLM imports torch, the package
itself imports nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dakrun.config import SamplingParams
    from dakrun.grammars import StructuredOutputsParams
    from dakrun.llm import LLM
    from dakrun.plan import Policy
    from dakrun.requests import Completion

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "Policy",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_MODULES = {
    "LLM": "dakrun.llm",
    "Completion": "dakrun.requests",
    "Policy": "dakrun.plan",
    "SamplingParams": "dakrun.config",
    "StructuredOutputsParams": "dakrun.grammars",
}

if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
