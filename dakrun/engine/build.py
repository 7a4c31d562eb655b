"""From a plan and where weights come from to a runner: on the GPU's kernels, or in plain torch."""

from collections.abc import Mapping

import torch

from dakrun.config import ModelConfig
from dakrun.engine.accesses import tier_accesses
from dakrun.engine.graph_runner import GraphRunner
from dakrun.engine.kvcache import KVCache
from dakrun.engine.packed_cache import PackedKVCache
from dakrun.engine.prompt_pass import PromptPass
from dakrun.engine.runner import Runner, TorchRunner
from dakrun.engine.staging import StagedOperands, staged_bytes
from dakrun.geometry import KV_BLOCK, ROWS_PER_BLOCK, SPLITK_X_TILES
from dakrun.kernels.gemm.tiled import x_tiles
from dakrun.kernels.runtime.jit import architecture, compiling
from dakrun.kernels.variants import Variant, variants
from dakrun.memory.tiers import Tier
from dakrun.models.kernel_decoder import KernelDecoder, Operands, Resident
from dakrun.models.llama import Llama
from dakrun.models.opt import Opt
from dakrun.plan.ops import kv_staging_bytes
from dakrun.plan.planner import Plan
from dakrun.plan.prefill_choice import STAGING_BUFFERS
from dakrun.weights.checkpoint import Checkpoint, Manifest
from dakrun.weights.dummy import Dummy
from dakrun.weights.loading import Packing, Tensors, load

ROWS = [ROWS_PER_BLOCK * tiles for tiles in SPLITK_X_TILES]  # for each variant of SplitK_GEMM
DECODERS: dict[str, type[Llama] | type[Opt]] = {"llama": Llama, "opt": Opt}


def manifest_of(model: ModelConfig, source: Checkpoint | Dummy) -> Manifest:
    """The tensors of `model`, by the names that they have in `source`."""
    return DECODERS[model.family].manifest(model, source.__contains__)


def torch_runner(
    source: Tensors,
    manifest: Manifest,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
) -> Runner:
    """One in plain torch, with its weights and slots in `tiers`."""
    cache = KVCache(plan, tiers, getattr(torch, plan.model.dtype))
    weights = load(source, manifest, plan, tiers, device)
    kind = DECODERS[plan.model.family]
    return TorchRunner(kind(plan.model, weights, plan.workload.max_model_len), cache, device)


def graph_runner(
    source: Tensors,
    manifest: Manifest,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
) -> Runner:
    """One on the GPU's kernels, with its weights and slots in `tiers`."""
    accesses = tier_accesses(plan)
    cache = PackedKVCache(plan, tiers, getattr(torch, plan.model.dtype), device)
    packing = Packing(accesses, plan.profile.sms)
    with compiling(_kernels(plan, device), architecture(device.index)):
        weights = load(source, manifest, plan, tiers, device, packing=packing)
    torch.cuda.empty_cache()  # of what loading took, which no other program could use
    positions = cache.shape.blocks * KV_BLOCK
    decoder = KernelDecoder(plan.model, manifest, weights, accesses, positions)
    steps, prefill = _operands(plan, decoder)
    staged = kv_staging_bytes(plan.model, plan.workload, plan.prefill.chunk_tokens)
    room = torch.empty(staged if any(cache.counts[1:]) else 0, dtype=torch.uint8, device=device)
    prompts = PromptPass(decoder, prefill, cache, room, plan.prefill.chunk_tokens)
    return GraphRunner(decoder, steps, prompts, cache, accesses["attention"])


def _kernels(plan: Plan, device: torch.device) -> list[Variant]:
    """All that the plan's model may be run with, for any number of rows."""
    model, remote = plan.model, range(1, len(plan.tiers))
    mixes = any(op.mixed(tier) for op in plan.weights() for tier in remote)
    return variants(
        getattr(torch, model.dtype), ROWS, x_tiles(device.index), head_dim=model.head_dim,
        group=model.num_heads // model.num_kv_heads, mixes=mixes,
    )  # fmt: skip


def _operands(plan: Plan, decoder: KernelDecoder) -> tuple[Operands, Operands]:
    """Operands of decode steps and of prefill: where they lie, or staged through one ring."""
    remote = [
        name
        for name in decoder.order
        if any(part.data.nbytes for part in decoder.matrices[name].parts[1:])
    ]
    in_steps = [name for name in remote if plan.op(name.split(".")[-1]).transport == "staged"]
    in_prefill = remote if plan.prefill.transport == "staged" else []
    sizes = [staged_bytes(decoder.matrices[name]) for name in {*in_steps, *in_prefill}]
    ring = torch.empty(
        STAGING_BUFFERS * max(sizes, default=0), dtype=torch.uint8, device=decoder.like.device
    )

    def operands(staged: list[str], *, ahead: bool) -> Operands:
        if not staged:
            return Resident(decoder.matrices)
        return StagedOperands(decoder.matrices, staged, ring, ahead=ahead)

    return operands(in_steps, ahead=True), operands(in_prefill, ahead=False)
