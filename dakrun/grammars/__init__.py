"""Answers of a given form: JSON of a schema, a regular expression, a choice, a grammar.

structured_outputs.py has the form that is asked for, compiling.py its grammar, which llguidance
compiles, guide.py the tokens that a request may get next, behind its thought, and parallel.py those
of many requests at once.
"""

from dakrun.grammars.compiling import MAX_COMPILED, Grammars, check_form, is_valid, json_options
from dakrun.grammars.guide import Guidance, Guide
from dakrun.grammars.parallel import ParallelGuides
from dakrun.grammars.structured_outputs import StructuredOutputsParams

__all__ = [
    "MAX_COMPILED",
    "Grammars",
    "Guidance",
    "Guide",
    "ParallelGuides",
    "StructuredOutputsParams",
    "check_form",
    "is_valid",
    "json_options",
]
