"""A run over several machines, for people: a table of the machines, and the time of the whole."""

from rich.console import Console

from dakrun.plan.nodes import ClusterForecast, NodeForecast
from dakrun.tables import Column, print_table

COLUMNS = (
    Column("profile", "left"),
    Column("machines"),
    Column("batch"),
    Column("ratio"),
    Column("rows each, most"),
    Column("tokens/s each"),
    Column("time"),
    Column("waits for", "left"),
)


def render_nodes(forecast: ClusterForecast, source: str, console: Console) -> None:
    """Print the table and the time of the run of `source`."""
    print_table(console, COLUMNS, [_line(kind) for kind in forecast.kinds], gap=2)
    console.print(f"{source}: {forecast}", highlight=False, markup=False)


def _line(kind: NodeForecast) -> tuple[str, ...]:
    return (
        kind.nodes.name,
        str(kind.nodes.count),
        str(kind.plan.workload.batch_size),
        f"{kind.plan.ratio:.1%}",
        str(kind.rows),
        f"{kind.run.tokens_per_s:,.0f}" if kind.run else "-",
        f"{kind.seconds:.1f} s",
        kind.run.waits_for if kind.run else "-",
    )
