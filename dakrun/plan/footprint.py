"""GPU memory that is neither matrices nor KV cache: vectors, activations and a reserve.

Knows the model and the workload; knows no ops and no machine.
"""

import math

from dakrun.config import DTYPE_BYTES, MAX_BIASES, ModelConfig, Workload
from dakrun.geometry import padded_tokens
from dakrun.launches import expert_buffer_bytes
from dakrun.models.families import decoder_of
from dakrun.units import ceil_div

BYTES_PER_ADJUSTED = 16  # of a token with a logit of its own: token, count, bias, logit
RESERVE_BYTES = 320 << 20  # of GPU memory: see reserve_bytes
# The driver maps page-locked memory in pages of 4 KiB, with 8 bytes for each, which makes 512;
# measured on an H200 for 19 and 49 GiB, 480 to 510 and some 20 MiB beside, which 400 covers.
HOST_BYTES_PER_PAGE_TABLE_BYTE = 400
PREFILL_CHUNK_TOKENS = 2048  # tokens of a pass in plain torch
VERIFIED_TOKENS, DRAFTING_ROWS = 1024, 256  # of a step with drafts, at most
PROMPT_ENDS = 32  # of a step whose rows have drafts, at most
DRAFT_INDEX_BYTES = 8 << 20  # of answers of the run, see dakrun/kernels/draft_tokens.py
DRAFT_GRAPHS_BYTES = 16 << 20  # of at most 15 CUDA graphs of steps with drafts


def vector_bytes(model: ModelConfig) -> int:
    """Bytes of norms, biases, learned positions and routers, which stay in the local tier."""
    size, vectors = DTYPE_BYTES[model.dtype], decoder_of(model).vectors()
    return sum(math.prod(one.shape) * (4 if one.wide else size) for one in vectors)


def activation_bytes(
    model: ModelConfig, workload: Workload, chunk_tokens: int = PREFILL_CHUNK_TOKENS
) -> int:
    """Upper estimate of activations: the largest pass, the batch's logits, and what chooses tokens.

    It covers a pass of `chunk_tokens` on the kernels, and one of PREFILL_CHUNK_TOKENS in plain
    torch, which needs more memory per token. Plain torch chooses tokens with float32 copies of the
    logits; the kernels with tables of the requests that ask for penalties, which are made only for
    these (dakrun/kernels/adjustments.py). Logits for log-probabilities of prompts lie in buffers of
    the pass, which are idle then (KernelBackend.for_logits).
    """
    size, qkv = DTYPE_BYTES[model.dtype], model.q_size + 2 * model.kv_size
    tokens = pass_tokens(workload, PREFILL_CHUNK_TOKENS)
    width = 4 * model.hidden_size + 2 * qkv + 3 * model.ffn_size
    if of := model.mixture:  # an expert may have all tokens
        width += 4 * model.hidden_size + (of.routing.top_k + 3) * of.ffn_size
    scores = model.num_heads * min(tokens, workload.max_model_len)
    in_torch = tokens * (width * size + scores * 4)
    hidden = max(model.hidden_size, model.q_size)  # normalized rows, or attention's output
    width = sum(decoder_of(model).widths.values()) + model.q_size + hidden
    # KV of a prompt's earlier passes
    cached = 3 * model.kv_layout.position_bytes * workload.max_model_len
    verified = verified_tokens(workload)
    verified += min(PROMPT_ENDS, workload.batch_size) if verified else 0
    # With those of a decode step.
    rows = padded_tokens(pass_tokens(workload, chunk_tokens) + workload.batch_size)
    in_kernels = rows * width * size + cached
    in_kernels += kv_staging_bytes(model, workload, chunk_tokens)
    if of := model.mixture:
        experts, top_k = of.routing.experts, of.routing.top_k
        in_kernels += sum(
            expert_buffer_bytes(
                n,
                experts=experts,
                top_k=top_k,
                hidden=model.hidden_size,
                ffn=of.ffn_size,
                quantized=model.quantization is not None,
            )
            # of passes with prompts, of decode steps, and of those with drafts
            for n in (rows, workload.batch_size, verified)
            if n
        )
    logits, vocabulary = workload.batch_size * model.vocab_size, model.vocab_size
    tables = workload.batch_size * adjustment_bytes(workload.max_model_len, vocabulary)
    # Logits twice: those whose log-probabilities are wanted are copied.
    drafting = verified * (width + 2 * vocabulary) * size
    if verified:
        texts = 4 * workload.batch_size * workload.max_model_len
        drafting += texts + DRAFT_INDEX_BYTES + DRAFT_GRAPHS_BYTES
    return max(in_torch, in_kernels) + max(3 * logits * 4, 2 * logits * size + tables) + drafting


def verified_tokens(workload: Workload) -> int:
    """Tokens of the largest step with drafts, at most; 0 if there are none.

    Many rows have fewer drafts each, and more than DRAFTING_ROWS have none: then products wait for
    arithmetic, with few tokens of a row.
    """
    if not (most := workload.speculation.most):
        return 0
    return min(VERIFIED_TOKENS, min(workload.batch_size, DRAFTING_ROWS) * (1 + most))


def adjustment_bytes(max_model_len: int, vocabulary: int) -> int:
    """Most bytes of the tokens that a request of up to `max_model_len` counts for penalties."""
    return BYTES_PER_ADJUSTED * min(max_model_len + MAX_BIASES, vocabulary)


def reserve_bytes(host_bytes: int) -> int:
    """Bytes of GPU memory kept for all that has no entry of its own in the plan.

    RESERVE_BYTES cover, in MiB measured on an H200, code of kernels (90), CUDA graphs (10),
    workspaces of products and of attention (up to 75) and rounding by torch's allocator (20 to
    80). The rest is for graphs of small passes with prompts: at most 24 of less than 1 MiB, and the
    normalized rows that they share, 25 MiB with a hidden size of 4,096 (both estimated). While
    weights load, none of these is used yet, and temporary memory (up to 220) is used instead. In
    addition the driver needs page tables for `host_bytes` of page-locked memory.
    """
    return RESERVE_BYTES + ceil_div(host_bytes, HOST_BYTES_PER_PAGE_TABLE_BYTE)


def kv_staging_bytes(model: ModelConfig, workload: Workload, chunk_tokens: int) -> int:
    """Bytes of one layer's keys and values of a pass, staged on their way to remote slots."""
    return pass_tokens(workload, chunk_tokens) * model.kv_layout.position_bytes


def pass_tokens(workload: Workload, chunk_tokens: int) -> int:
    """Tokens of the largest pass, where passes have up to `chunk_tokens`."""
    return min(chunk_tokens, workload.batch_size * workload.max_model_len)
