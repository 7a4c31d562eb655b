"""Builds the runner of a plan and loads its weights: on the project's kernels, or in plain torch.

Knows which plans the kernels can run, and how they read each tier under a plan.
"""

import bisect
from collections.abc import Mapping, Sequence

import torch

from dakrun.config import ModelConfig
from dakrun.engine.decode_step import DecodeStep
from dakrun.engine.expert_copies import ExpertCopies
from dakrun.engine.graph_runner import GraphRunner
from dakrun.engine.kernel_backend import KernelBackend
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_layout import RowLayout
from dakrun.engine.prefill import Prefill
from dakrun.engine.reference_runner import ReferenceRunner
from dakrun.engine.runner import Runner
from dakrun.engine.staging import PassStaging, Staging, staged_bytes
from dakrun.geometry import KV_BLOCK, ROWS_PER_BLOCK, SPLITK_X_TILES, padded_tokens
from dakrun.hardware import Card, HardwareProfile
from dakrun.kernels import Variant, variants
from dakrun.kernels.attention import KVShape
from dakrun.kernels.experts.route import can_route
from dakrun.kernels.runtime import architecture, card_of, compiling, has_kernels
from dakrun.launches import TierAccess
from dakrun.memory.tiers import Tier
from dakrun.models.families import decoder_of
from dakrun.plan import (
    RING_GROUPS,
    STAGED_TOGETHER,
    Links,
    OpPlan,
    Plan,
    StepCosts,
    bytes_ahead,
    kv_positions,
    kv_staging_bytes,
    pass_tokens,
    ring_bytes,
    spare_experts,
)
from dakrun.weights.loading import OnLoad, Packing, Tensors, load, unreadable

MOST_TOKENS = 1 << 20  # of a pass, in the search for those that stage experts
SPLITK_ROWS = [ROWS_PER_BLOCK * tiles for tiles in SPLITK_X_TILES]  # maximum rows of X by variant


def runs_on_kernels(plan: Plan, device: torch.device) -> bool:
    """Whether `device` has kernels for all ops of the plan's model."""
    return has_kernels(device) and _without_kernels(plan) is None


def _without_kernels(plan: Plan) -> str | None:
    """What of the plan's model no kernel takes; None if kernels take all of it."""
    model, heads = plan.model, plan.model.kv_layout
    if (op := unreadable(plan)) is not None:
        return f"{op.name}, a matrix of {op.shape[1]} columns in {model.dtype}"
    if not heads.has_kernels(model.num_heads):
        counts = f"{model.num_heads} query heads and {heads.kv_heads} KV heads"
        return f"attention, {counts} of {heads.head_dim} elements in {model.dtype}"
    if model.mixture and not _experts_fit(model):
        rule, size = model.mixture.routing, model.mixture.ffn_size
        chosen = f"{rule.top_k} of {rule.experts} in {rule.groups} groups"
        return f"experts, {chosen}, {size} rows by {model.hidden_size} columns each"
    return None


def _experts_fit(model: ModelConfig) -> bool:
    """Whether kernels choose the experts of a mixture and multiply by them."""
    if (mixture := model.mixture) is None:
        return True
    whole = mixture.ffn_size % ROWS_PER_BLOCK == 0 and model.hidden_size % ROWS_PER_BLOCK == 0
    return whole and can_route(mixture.routing)


def why_plain_torch(plan: Plan, device: torch.device) -> str | None:
    """Why a GPU runs plain torch instead of the kernels; None where it runs them, or on a CPU."""
    if device.type != "cuda" or runs_on_kernels(plan, device):
        return None
    if not has_kernels(device):
        return f"{torch.cuda.get_device_name(device)} lacks what the kernels need (dakrun doctor)"
    return f"there are no kernels for {plan.model.name}'s {_without_kernels(plan)}"


def build_runner(
    source: Tensors,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
    on_load: OnLoad = lambda done, total: None,
) -> Runner:
    """Allocate weights and KV blocks in `tiers`, and load the weights from `source`, once checked.

    The runner uses the project's kernels if they support the model on `device`, else plain torch.
    """
    if not runs_on_kernels(plan, device):
        return _reference_runner(source, plan, tiers, device, on_load)
    model = plan.model
    card = card_of(device)
    accesses = tier_accesses(plan, card)
    shape = KVShape(model.num_kv_heads, model.head_dim, kv_positions(plan.workload))
    cache = KVCache(
        plan.kv_placement(),
        model.num_layers,
        shape,
        tiers,
        device,
        spill_blocks=plan.kv_spill_blocks,
    )
    packing = Packing(accesses, card)
    with compiling(_kernels(plan, device), architecture(device.index)):
        weights = load(source, plan, tiers, device, packing=packing, on_load=on_load)
    torch.cuda.empty_cache()  # return the temporary memory of loading to the driver
    positions = shape.blocks * KV_BLOCK
    backend = KernelBackend(decoder_of(model), weights, accesses, positions)
    steps, prompts = _stagings(plan, backend)
    step = DecodeStep(backend.with_buffers(cache.slots, steps), cache, shape, accesses["attention"])
    chunk_tokens = plan.prefill.chunk_tokens
    staged = kv_staging_bytes(model, plan.workload, chunk_tokens)
    remote = cache.spill_blocks or any(cache.counts[1:])
    room = torch.empty(staged if remote else 0, dtype=torch.uint8, device=device)
    tokens = padded_tokens(pass_tokens(plan.workload, chunk_tokens) + cache.slots)
    passes = backend.with_buffers(tokens, prompts, logits=False, prompts=True)
    prefill = Prefill(passes, cache, shape, room, chunk_tokens)
    return GraphRunner(step, prefill, cache, shape, _expert_copies(plan, backend))


def _reference_runner(
    source: Tensors, plan: Plan, tiers: Mapping[str, Tier], device: torch.device, on_load: OnLoad
) -> Runner:
    model, dtype = plan.model, getattr(torch, plan.model.dtype)
    layout = RowLayout(model.num_kv_heads, model.head_dim, kv_positions(plan.workload), dtype)
    cache = KVCache(
        plan.kv_placement(),
        model.num_layers,
        layout,
        tiers,
        device,
        spill_blocks=plan.kv_spill_blocks,
    )
    weights = load(source, plan, tiers, device, on_load=on_load)
    return ReferenceRunner(decoder_of(model), weights, cache, layout, plan.workload.max_model_len)


def _kernels(plan: Plan, device: torch.device) -> list[Variant]:
    """All kernel variants that the plan's model may need, for any number of rows."""
    model, remote = plan.model, range(1, len(plan.tiers))
    mixes = any(op.mixed(tier) for op in plan.weights() for tier in remote)
    formats = dict.fromkeys(op.op.stored(packed=True) for op in plan.weights())
    return variants(
        getattr(torch, model.dtype), SPLITK_ROWS, card_of(device), head_dim=model.head_dim,
        group=model.num_heads // model.num_kv_heads, mixes=mixes,
        spills=plan.kv_spill_blocks > 0,
        head_norms=any(
            attention.norms and not attention.norms_all_heads
            for attention in decoder_of(model).attentions
        ),
        routing=model.mixture.routing if model.mixture else None, formats=formats,
    )  # fmt: skip


def _stagings(plan: Plan, backend: KernelBackend) -> tuple[PassStaging, PassStaging]:
    """What decode steps stage, and what passes of prompts stage, through one ring."""
    matrices, prefill = backend.matrices, plan.prefill
    remote = {
        one.name: plan.op(one.op) for one in backend.order if staged_bytes(matrices[one.name])
    }
    largest, few_tokens = prefill.chunk_tokens, _few_tokens(plan)
    steps = [name for name, op in remote.items() if op.transport == "staged"]
    prompts = [
        name
        for name, op in remote.items()
        if prefill.stages(op.op.with_rows(largest), op.shares[0])
    ]
    sizes = {name: staged_bytes(matrices[name]) for name in {*steps, *prompts}}
    ahead = bytes_ahead(plan.ops, plan.profile, plan.tiers[1:], plan.model.dtype)
    ring = torch.empty(
        ring_bytes(max(sizes.values(), default=0), sum(sizes.values()), ahead),
        dtype=torch.uint8,
        device=backend.like.device,
    )
    together = min(STAGED_TOGETHER, ring.numel() // RING_GROUPS)

    def staging(names: list[str], *, early: bool, behind: Sequence[str] = ()) -> PassStaging:
        few = [name for name in names if not remote[name].op.chances]

        def of(names: list[str]) -> Staging | None:
            if not names:
                return None
            return Staging(matrices, names, ring, together=together, early=early, behind=behind)

        most = of(names)
        return PassStaging(most, most) if few == names else PassStaging(most, of(few), few_tokens)

    behind = [layer.o.name for layer in backend.model.layers] if ahead else []
    return staging(steps, early=True, behind=behind), staging(prompts, early=False)


def _few_tokens(plan: Plan) -> int:
    """The most tokens of a pass that is too small to stage experts, where larger ones do."""
    experts = [op for op in plan.ops if op.op.chances and op.remote_bytes]

    def staged(tokens: int) -> bool:
        return any(op.op.with_rows(tokens).can_be_staged(op.shares[0]) for op in experts)

    return bisect.bisect_left(range(1, MOST_TOKENS), True, key=staged) if experts else 0


def _expert_copies(plan: Plan, backend: KernelBackend) -> ExpertCopies | None:
    """Exchanges of experts between tiers; None where all lie in one, or there are none."""
    use, tables = backend.expert_use, backend.expert_tables
    if use is None or tables is None:
        return None
    mixture, count = use.mixtures[0], len(use.orders[0])
    size = sum(
        matrix.format.nbytes(matrix.shape[0] // count, matrix.shape[1])
        for matrix in (backend.matrices[one.name] for one in (mixture.up, mixture.down))
    )
    together = spare_experts(size)
    spare = torch.empty(together * size, dtype=torch.uint8, device=backend.like.device)
    remote = {
        plan.tiers[tier]
        for op in plan.ops
        for tier in range(1, len(plan.tiers))
        if op.op.chances and op.resident_bytes(tier)
    }
    rate = min(Links.of(plan.profile, plan.tiers[1:]).staged[tier] for tier in remote)
    return ExpertCopies(use, backend.matrices, tables, spare, together, rate)


def tier_accesses(plan: Plan, card: Card) -> dict[str, tuple[TierAccess, ...]]:
    """How kernels on `card` read each of the plan's tiers, by op, the local tier first.

    A staged part is read from HBM, by SMs in proportion to its bytes. Of staged experts it says how
    steps of few rows read them, which do not stage them.
    """
    return {op.op.name: (TierAccess(), *_remote(plan, op, card)) for op in plan.ops}


def direct_accesses(
    profile: HardwareProfile, remote: Sequence[str], sms: Sequence[int], card: Card
) -> list[TierAccess]:
    """How kernels on `card` read the tiers `remote`: `sms[i]` SMs, within the window of tier i.

    With 0 SMs a tier is mixed: the local tier's SMs read it among their own units.
    """
    tiers = (profile.tier(name) for name in remote)
    return [
        TierAccess(own or tier.sms, tier.window_bytes if card.windows else None, mixed=not own)
        for tier, own in zip(tiers, sms, strict=True)
    ]


def _remote(plan: Plan, op: OpPlan, card: Card) -> list[TierAccess]:
    """How kernels read the remote tiers of `op`."""
    names = plan.tiers[1:]
    if op.transport == "staged" and op.op.chances:
        costs = StepCosts(plan.model, plan.workload, plan.profile, names)
        op_sms = costs.placed(op.op, op.placement, "direct").sms
        return direct_accesses(plan.profile, names, op_sms[1:], card)
    if op.transport == "direct":
        return direct_accesses(plan.profile, names, op.sms[1:], card)
    held = [op.resident_bytes(tier) for tier in range(len(plan.tiers))]
    return [TierAccess(max(1, own)) for own in _sms_of(held, plan.profile.sms)[1:]]


def _sms_of(nbytes: Sequence[int], sms: int) -> list[int]:
    """How many of `sms` SMs read each part of `nbytes`, so that the last of them ends soonest.

    Each SM more is for the part with most bytes to an SM. Rounded shares would not do: of 1.1% of
    the bytes, 1.45 of 132 SMs', one SM takes 1.45 times as long as all others for theirs.
    """
    found = [int(n > 0) for n in nbytes]
    for _ in range(sms - sum(found)):
        found[max(range(len(found)), key=lambda i: nbytes[i] / max(1, found[i]))] += 1
    return found
