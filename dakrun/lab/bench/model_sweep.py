"""`dakrun bench --model`: batch sizes, offload ratios, transports and strategies, and their points.

Parses the command line's values; needs no GPU and no torch.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dakrun.config import LoadFormat, ModelConfig
from dakrun.errors import UsageError
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.lab.bench.kernel_sweep import BenchDtype, parse_ratio
from dakrun.models import known_model, model_config
from dakrun.models.hub import in_format
from dakrun.models.popularity import with_popularity
from dakrun.plan import Policy, Strategy, parse_remote

AUTO: Literal["auto"] = "auto"

ModelRatio = float | Literal["auto"]
TransportChoice = Literal["auto", "direct", "staged"]
Rival = Literal["transformers", "prefetch", "uva", "on-demand"]
Order = Literal["use", "number"]  # of experts in memory


@dataclass(frozen=True)
class ModelCase:
    """Decode steps of `batch_size` requests with `ratio` of all weight and KV bytes offloaded.

    With "auto" the planner chooses the ratio or the transport. Experts are placed in the `order` of
    their use, as far as it is known, or of their numbers.
    """

    batch_size: int
    transport: TransportChoice
    ratio: ModelRatio
    strategy: Strategy = "auto"
    order: Order = "use"

    def __str__(self) -> str:
        ratio = "planned ratio" if self.ratio == AUTO else f"{self.ratio:.2%}"
        strategy = "" if self.strategy == "auto" else f", {self.strategy}"
        order = "" if self.order == "use" else f", experts by {self.order}"
        return f"batch {self.batch_size}, {ratio} remote, {self.transport}{strategy}{order}"

    def policy(self, common: Policy) -> Policy:
        """The policy of the point's plan; `common` has the fields that all points share."""
        return replace(
            common,
            offload_ratio=None if self.ratio == AUTO else self.ratio,
            transport=None if self.transport == AUTO else self.transport,
            strategy=self.strategy,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSweep:
    """The model `name` with every batch size, transport, strategy and offload ratio.

    A request has `prompt_len` prompt and `new_tokens` new tokens. `load_format` "dummy" means
    random weights, in `format` (see RunOptions). `policy` has the remote tiers and the budgets.
    `rival` is another program to measure: "transformers" with the whole model in HBM, "prefetch"
    and "uva" also with layers in host memory, "on-demand" with experts there. `popularity` is that
    of experts (see RunOptions): random routers choose by it. Steps with `speculate` drafts a row
    are measured too, if it is not 0.
    """

    name: str
    config: ModelConfig
    load_format: LoadFormat
    policy: Policy
    prompt_len: int
    new_tokens: int
    format: str = AUTO
    rival: Rival | None = None
    popularity: str = AUTO
    speculate: int = 0
    batch_sizes: tuple[int, ...] = (8,)
    ratios: tuple[ModelRatio, ...] = (0.0,)
    transports: tuple[TransportChoice, ...] = (AUTO,)
    strategies: tuple[Strategy, ...] = (AUTO,)
    orders: tuple[Order, ...] = ("use",)

    def __post_init__(self) -> None:
        length, limit = self.prompt_len + self.new_tokens, self.config.max_positions
        if length > limit:
            raise UsageError(
                f"{self.prompt_len} prompt and {self.new_tokens} new tokens exceed the {limit} "
                f"positions of {self.config.name}",
                hint="lower --prompt-len or --new-tokens",
            )

    def points(self) -> Iterator[ModelCase]:
        """The points by batch size, transport, ratio, strategy and order of experts."""
        return itertools.starmap(ModelCase, itertools.product(
            self.batch_sizes, self.transports, self.ratios, self.strategies, self.orders
        ))  # fmt: skip

    def remote_tiers(self, profile: HardwareProfile) -> list[RemoteTier]:
        """The remote tiers in `profile`; an empty list if every ratio is 0.

        Raises UsageError if the profile has no such tier.
        """
        tiers = [profile.tier(name) for name in self.policy.remote_tiers(profile)]
        return tiers if any(ratio != 0 for ratio in self.ratios) else []


def model_sweep(
    *, model: str | None, dtype: BenchDtype, ratios: Iterable[str], remote: str,
    hbm_budget: int | None, host_budget: int | None, peer_budget: int | None, **options: Any,
) -> ModelSweep:  # fmt: skip
    """The sweep of the command line's options; UsageError if one is malformed.

    Those of `options` are fields of ModelSweep; what is asked for twice is measured once.
    """
    if model is None:
        raise UsageError(
            "bench needs a kernel or a model",
            hint="add --kernel gemm, --kernel attention or --model DIR",
        )
    is_path = Path(model).expanduser().exists()
    if options["load_format"] == "auto" and not is_path and known_model(model) is not None:
        raise UsageError(
            f"{model!r} names an architecture, not a checkpoint",
            hint="add --load-format dummy for random weights, or name a folder or a hub id",
        )
    config = in_format(model_config(model).with_dtype(dtype), options["format"])
    for flag, asked, hint in (
        ("--expert-order", set(options["orders"]) != {"use"}, "leave it out"),
        ("--rival on-demand", options["rival"] == "on-demand", "use --rival prefetch"),
    ):
        if asked and config.mixture is None:
            raise UsageError(
                f"{flag} is for mixtures of experts; {config.name} has none", hint=hint
            )
    if options["popularity"] != AUTO:
        with_popularity(config, options["popularity"])  # raises if it is not of this model
    many: dict[str, Any] = {name: tuple(dict.fromkeys(options.pop(name)))
            for name in ("batch_sizes", "transports", "strategies", "orders")}  # fmt: skip
    policy = Policy(
        hbm_budget=hbm_budget,
        host_budget=host_budget,
        peer_budget=peer_budget,
        remote=parse_remote(remote),
    )
    found = tuple(dict.fromkeys(parse_ratio(text, AUTO) for text in ratios))
    return ModelSweep(name=model, config=config, policy=policy, ratios=found, **many, **options)
