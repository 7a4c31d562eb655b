"""The octet: 8 whole rows of a matrix, the unit in which it is placed, stored and computed.

An octet lies in one tier. The last one of a matrix may have fewer rows.
"""

from dakrun.units import ceil_div

OCTET_ROWS = 8


def octet_count(rows: int) -> int:
    """Octets of a matrix of `rows`."""
    return ceil_div(rows, OCTET_ROWS)


def first_row(octet: int, rows: int) -> int:
    """Where an octet of a matrix of `rows` begins; behind the last one, where the matrix ends."""
    return min(octet * OCTET_ROWS, rows)
