"""What `dakrun bench --model` is asked to measure: batches, remote shares, transports, lengths.

Knows how users write them; needs no GPU and no torch.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dakrun.bench.sweep import BenchDtype, parse_share
from dakrun.config import LoadFormat, ModelConfig
from dakrun.errors import UsageError
from dakrun.hardware.profile import HardwareProfile, RemoteTier
from dakrun.models.hub import model_config
from dakrun.models.known import known_model
from dakrun.plan.policy import Policy, Strategy, parse_remote

AUTO: Literal["auto"] = "auto"

ModelRatio = float | Literal["auto"]
AskedTransport = Literal["auto", "direct", "staged"]
Rival = Literal["transformers"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Decode steps of `batch_size` requests with a share `ratio` of all weight and KV bytes remote.

    "auto" leaves the share, or how it is read, to the planner.
    """

    batch_size: int
    ratio: ModelRatio
    transport: AskedTransport
    strategy: Strategy = "greedy"

    def __str__(self) -> str:
        share = "a planned share" if self.ratio == AUTO else f"{self.ratio:.2%}"
        alike = ", uniform" if self.strategy == "uniform" else ""
        return f"batch {self.batch_size}, {share} remote, {self.transport}{alike}"

    def policy(self, common: Policy) -> Policy:
        """What is fixed of the plan: by the point, and by what all points have in `common`."""
        return replace(
            common,
            offload_ratio=None if self.ratio == AUTO else self.ratio,
            transport=None if self.transport == AUTO else self.transport,
            strategy=self.strategy,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSweep:
    """The model `name` with every batch size, transport, strategy and remote share.

    A request has `prompt_len` prompt and `new_tokens` new tokens. `load_format` "dummy" means
    random weights; `policy` has the tiers that hold the share, as a profile names them, and the
    budgets. `rival` is what else to measure, with all of the model in HBM.
    """

    name: str
    config: ModelConfig
    load_format: LoadFormat
    batch_sizes: tuple[int, ...]
    ratios: tuple[ModelRatio, ...]
    transports: tuple[AskedTransport, ...]
    strategies: tuple[Strategy, ...]
    policy: Policy
    prompt_len: int
    new_tokens: int
    rival: Rival | None

    def __post_init__(self) -> None:
        room, most = self.prompt_len + self.new_tokens, self.config.max_positions
        if room > most:
            raise UsageError(
                f"{self.prompt_len} prompt and {self.new_tokens} new tokens are beyond the {most} "
                f"positions of {self.config.name}",
                hint="lower --prompt-len or --new-tokens",
            )

    def points(self) -> Iterator[Point]:
        """What is measured, by batch size, transport, share and strategy."""
        for batch_size, transport, ratio, strategy in itertools.product(
            self.batch_sizes, self.transports, self.ratios, self.strategies
        ):
            yield Point(batch_size=batch_size, ratio=ratio, transport=transport, strategy=strategy)

    def remote_tiers(self, profile: HardwareProfile) -> list[RemoteTier]:
        """The remote tiers in `profile`, or none where every share is 0.

        Raises UsageError where the profile has no such tier.
        """
        tiers = [profile.tier(name) for name in self.policy.remote_tiers(profile)]
        return tiers if any(ratio != 0 for ratio in self.ratios) else []


def model_sweep(
    *,
    model: str | None,
    load_format: LoadFormat,
    batch_sizes: Sequence[int],
    ratios: Iterable[str],
    transports: Sequence[AskedTransport],
    strategies: Sequence[Strategy],
    remote: str,
    dtype: BenchDtype,
    prompt_len: int,
    new_tokens: int,
    rival: Rival | None,
    hbm_budget: int | None,
    host_budget: int | None,
    peer_budget: int | None,
) -> ModelSweep:
    """What the command line asks for; UsageError where something of it is malformed."""
    if model is None:
        raise UsageError(
            "neither a kernel nor a model is named",
            hint="add --kernel gemm, --kernel attention or --model DIR",
        )
    is_path = Path(model).expanduser().exists()
    if load_format == "auto" and not is_path and known_model(model) is not None:
        raise UsageError(
            f"{model!r} names an architecture, not a checkpoint",
            hint="add --load-format dummy for random weights, or name a folder or a hub id",
        )
    return ModelSweep(
        name=model,
        config=model_config(model).with_dtype(dtype),
        load_format=load_format,
        batch_sizes=tuple(dict.fromkeys(batch_sizes)),
        ratios=tuple(dict.fromkeys(map(parse_model_ratio, ratios))),
        transports=tuple(dict.fromkeys(transports)),
        strategies=tuple(dict.fromkeys(strategies)),
        policy=Policy(
            hbm_budget=hbm_budget,
            host_budget=host_budget,
            peer_budget=peer_budget,
            remote=parse_remote(remote),
        ),
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        rival=rival,
    )


def parse_model_ratio(text: str) -> ModelRatio:
    """The remote share in a text such as "0.1" or "auto"; UsageError for anything else."""
    return AUTO if text == AUTO else parse_share(text, AUTO)
