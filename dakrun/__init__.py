"""dakrun: offline batch inference whose weights and KV cache lie in several memory tiers.

Importing the package imports nothing else: a name of the Python API brings its module (LLM brings
torch) when it is first asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dakrun.config import SamplingParams
    from dakrun.llm import LLM
    from dakrun.plan.policy import Policy
    from dakrun.requests import Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Policy", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "dakrun.llm",
    "Completion": "dakrun.requests",
    "Policy": "dakrun.plan.policy",
    "SamplingParams": "dakrun.config",
}

if not TYPE_CHECKING:  # a type checker would take any name of the package for one that exists

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
