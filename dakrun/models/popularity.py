"""Popularity of a model's experts as files: named by the user, or kept in the cache folder.

A file is a JSON object:

    {"dakrun_popularity": 1, "model": "Qwen3-30B-A3B", "family": "qwen3_moe", "hidden_size": 2048,
     "experts": 128, "experts_per_token": 8, "layers": [0, 1, ...], "counts": [[31, 0, ...], ...]}

`layers` are the numbers of the layers with experts; `counts` has a row for each of them: how many
tokens chose each expert, by the expert's number.

Counts place experts and change no token, so stale ones cost time alone. Kept counts fade: they are
of about the last KEPT_TOKENS tokens, so those of another revision of the weights, or of other
prompts, give way to those of newer runs. A kept file that is damaged, or that another version of
dakrun has written in another form, counts as none and is written anew. A file that the user names
must be of this form and of the model's architecture.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dakrun.config import ModelConfig, Popularity
from dakrun.errors import UsageError
from dakrun.models.files import read_json_object
from dakrun.resources import cache_dir

AUTO, UNIFORM, ZIPF = "auto", "uniform", "zipf:"
SCHEMA = 1
KEPT_TOKENS = 1 << 20  # whose choices the cache folder keeps
_KIND, _COUNTS, _MODEL = "dakrun_popularity", "counts", "model"


def with_popularity(
    config: ModelConfig, name: str, *, random: bool = False, choices: str = AUTO
) -> ModelConfig:
    """`config` whose experts are placed by the popularity called `name`.

    That is "uniform", all experts alike; "zipf:S", Zipf's law with exponent S; a file; or "auto",
    the counts of earlier runs of the model if there are any, else uniform. Weights that are
    `random` have no earlier runs; their routers choose by the popularity `choices`, by default the
    one that experts are placed by (see weights/random_routers.py). Raises UsageError if a file is
    malformed or of another model, if the model has no experts, or for `choices` of a checkpoint.
    """
    if choices != AUTO and not random:
        raise UsageError(
            f"a checkpoint's routers cannot choose by {choices}", hint="add --load-format dummy"
        )
    mixture = config.mixture
    if mixture is None:
        if {name, choices} <= {AUTO, UNIFORM}:
            return config
        given = name if choices == AUTO else choices
        raise UsageError(
            f"--popularity {given}: {config.name} has no experts", hint="leave out --popularity"
        )
    placing = _named(config, name, kept=not random)
    chosen = placing if choices == AUTO else _named(config, choices, kept=False)
    if random and chosen:
        routing = replace(mixture.routing, biased=True)
        mixture = replace(mixture, routing=routing, choices=chosen)
    return replace(config, mixture=replace(mixture, popularity=placing))


def _named(config: ModelConfig, name: str, *, kept: bool) -> Popularity | None:
    """The popularity called `name`; None if all experts are alike, as far as is known."""
    assert config.mixture
    if name.startswith(ZIPF):
        routing, layers = config.mixture.routing, len(layers_of(config))
        return Popularity.zipf(layers, routing.experts, routing.top_k, _exponent(name))
    if name == AUTO:
        path = kept_path(config)
        with contextlib.suppress(UsageError):  # a damaged file is written again
            return read(path, config, "earlier runs") if kept and path.is_file() else None
        return None
    return None if name == UNIFORM else read(Path(name).expanduser(), config, name)


def read(path: Path, config: ModelConfig, source: str) -> Popularity:
    """The counts of a file; `source` says in plans and errors where they are from.

    Raises UsageError if it cannot be read, or has the counts of another model.
    """
    if not path.exists():
        raise UsageError(
            f"--popularity {source}: no such file", hint="name a file, uniform, or zipf:1.0"
        )
    data = read_json_object(path)
    if data.get(_KIND) != SCHEMA:
        raise UsageError(
            f"{source}: not a popularity file: {_KIND} is {data.get(_KIND)!r}, not {SCHEMA}",
            hint=f"dakrun generate keeps such files in {cache_dir() / 'popularity'}",
        )
    for key, expected in _identity(config).items():
        if data.get(key) != expected:
            raise UsageError(
                f"{source}: counts of {data.get(_MODEL)}, whose {key} is {_text(data.get(key))}; "
                f"that of {config.name} is {_text(expected)}",
                hint="name a file of this model, or leave out --popularity",
            )
    counts, experts = data.get(_COUNTS), data["experts"]
    rows = counts if isinstance(counts, list) else []
    if len(rows) != len(data["layers"]) or not all(
        isinstance(row, list) and len(row) == experts for row in rows
    ):
        raise UsageError(
            f"{source}: counts is not a table of {len(data['layers'])} layers by {experts} experts",
            hint="count again: move the file away, and run dakrun generate",
        )
    return Popularity(tuple(map(tuple, rows)), source)


def keep(config: ModelConfig, counts: Sequence[Sequence[int]]) -> None:
    """Add `counts` of a run, as in a file, to those kept of the model; written atomically.

    Counts kept before are scaled down where both are of more than KEPT_TOKENS tokens. Does nothing
    if the cache folder cannot be written, or if there are no counts.
    """
    if not any(map(any, counts)):
        return
    path = kept_path(config)
    with contextlib.suppress(UsageError):
        earlier = read(path, config, path.name).counts if path.is_file() else ()
        if earlier:
            assert config.mixture
            most = KEPT_TOKENS * config.mixture.routing.top_k  # of a layer
            share = min(1.0, max(0, most - sum(counts[0])) / max(1, sum(earlier[0])))
            pairs = zip(earlier, counts, strict=True)
            counts = [[int(share * a) + b for a, b in zip(*rows, strict=True)] for rows in pairs]
    data = {_KIND: SCHEMA, _MODEL: config.name, **_identity(config), _COUNTS: counts}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)


def kept_path(config: ModelConfig) -> Path:
    """The file in the cache folder for the counts of models of that name and architecture."""
    digest = hashlib.sha256(json.dumps(_identity(config)).encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", config.name)
    return cache_dir() / "popularity" / f"{name}-{digest}.json"


def layers_of(config: ModelConfig) -> list[int]:
    """The numbers of the layers with experts."""
    assert config.mixture
    return [at for at in range(config.num_layers) if at not in config.mixture.dense_layers]


def _identity(config: ModelConfig) -> dict[str, Any]:
    """The entries of a file that say which architecture its counts are of."""
    assert config.mixture
    routing = config.mixture.routing
    return {
        "family": config.family,
        "hidden_size": config.hidden_size,
        "experts": routing.experts,
        "experts_per_token": routing.top_k,
        "layers": layers_of(config),
    }


def _exponent(name: str) -> float:
    text = name.removeprefix(ZIPF)
    try:
        exponent = float(text)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 10:
        raise UsageError(
            f"--popularity {name}: {text!r} is not a number from 0 to 10",
            hint="zipf:1.0 is a usual one; zipf:0 chooses all experts alike",
        )
    return exponent


def _text(value: object) -> str:
    """An entry of a file; of a list its length."""
    return f"{len(value)} layers" if isinstance(value, list) else str(value)
