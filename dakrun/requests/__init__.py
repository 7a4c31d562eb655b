"""Prompt files in, result files out.

In: reader.py has the way of a row. lines.py reads lines, input_rows.py makes rows of them, and
Requests of rows in the formats of native_rows.py and openai_rows.py (messages.py has chats,
json_rows.py shared checks, neutral.py values that change nothing). look_ahead.py puts the longest
rows first, by the estimates of lengths.py, and keeps their content on disk (spool.py).
prompts.py says which prompts a model accepts, python_prompts.py makes requests of prompts of the
Python API, row_check.py checks rows before a run. gzip_files.py knows gzip, parquet_files.py
Parquet (arrow.py has its columns).

Out: native_rows.py and openai_results.py have the formats of results. destination.py checks where
results go, writer.py writes them durably (files.py), written_rows.py reads them again,
input_order.py puts them in order. fingerprint.py tells one run from another, row_digests.py one row
from another.

tokenizer.py wraps the model's tokenizer (tokenizer_files.py has its files), sentencepiece_model.py
one of a tokenizer.model alone. continuation.py makes text of tokens behind a prompt, and
stop_strings.py finds stop strings. answer_forms.py has the fields for forms of answers,
call_grammar.py the form of an answer that must call tools. chats.py makes text of chats,
chat_template.py runs their template. tool_calls.py finds calls of tools in answers, thoughts.py the
thoughts that they begin with. request.py holds the shared types. README.md describes the formats.
"""

from dakrun.requests.continuation import Continuation
from dakrun.requests.files import same_file
from dakrun.requests.fingerprint import fingerprint_path, make_fingerprint
from dakrun.requests.input_rows import AheadRow, own_id, parse_row
from dakrun.requests.lengths import PromptStarts, RowLengths
from dakrun.requests.native_rows import error_row
from dakrun.requests.parquet_files import ParquetOutput, is_parquet
from dakrun.requests.prompts import BadRow, PromptRules, check_ids, check_tokens
from dakrun.requests.python_prompts import Prompt, as_requests
from dakrun.requests.reader import RequestReader
from dakrun.requests.request import (
    Answer,
    Completion,
    IdSet,
    Logprobs,
    Reply,
    Request,
    RowError,
    TokenLogprob,
)
from dakrun.requests.row_check import EstimatedRules, RowCheck, check_rows
from dakrun.requests.row_digests import InputRow, digests_path
from dakrun.requests.sentencepiece_model import check_sentencepiece
from dakrun.requests.stop_strings import StopStrings
from dakrun.requests.thoughts import given_markers
from dakrun.requests.tokenizer import Tokenizer
from dakrun.requests.tool_calls import CALL_TOKENS, ToolCall, find_calls
from dakrun.requests.writer import ResultWriter, result_line

__all__ = [
    "CALL_TOKENS",
    "AheadRow",
    "Answer",
    "BadRow",
    "Completion",
    "Continuation",
    "EstimatedRules",
    "IdSet",
    "InputRow",
    "Logprobs",
    "ParquetOutput",
    "Prompt",
    "PromptRules",
    "PromptStarts",
    "Reply",
    "Request",
    "RequestReader",
    "ResultWriter",
    "RowCheck",
    "RowError",
    "RowLengths",
    "StopStrings",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "as_requests",
    "check_ids",
    "check_rows",
    "check_sentencepiece",
    "check_tokens",
    "digests_path",
    "error_row",
    "find_calls",
    "fingerprint_path",
    "given_markers",
    "is_parquet",
    "make_fingerprint",
    "own_id",
    "parse_row",
    "result_line",
    "same_file",
]
