"""Drafts: tokens that a request may get next, guessed from text that is there already.

A step that carries drafts of a request computes which of them the model would have chosen; the
others are dropped, so drafts change how long a run takes and none of its results. suffix.py finds
the end of a text again in the same text, file_index.py in the answers of the whole run;
common_token.py has a draft for where neither does. draft_lengths.py says how many tokens are worth
drafting, drafter.py proposes them for the rows of a step. README.md follows a draft through the
code. Knows tokens and slots; neither models nor devices.
"""

from dakrun.drafts.common_token import CommonToken
from dakrun.drafts.draft_lengths import LEAST_CHANCE, DraftLengths
from dakrun.drafts.drafter import Drafter
from dakrun.drafts.file_index import FileIndex
from dakrun.drafts.suffix import continuation, longest_match

__all__ = [
    "LEAST_CHANCE",
    "CommonToken",
    "DraftLengths",
    "Drafter",
    "FileIndex",
    "continuation",
    "longest_match",
]
