"""A linear program of a few dozen variables, solved exactly enough by the simplex method.

Dense and two-phase, after Chvatal, Linear Programming (1983), chapters 2 and 3. Knows no ops.
"""

import numpy as np
import numpy.typing as npt

_TOLERANCE = 1e-10
Matrix = npt.NDArray[np.float64]


def minimise(
    cost: Matrix, at_most: tuple[Matrix, Matrix], equal: tuple[Matrix, Matrix]
) -> Matrix | None:
    """x >= 0 of least cost @ x with A x <= b and E x = d, or None where there is none.

    `cost` is [n]; `at_most` is (A [p, n], b [p]) and `equal` (E [q, n], d [q]); no entry of b or d
    may be negative. Coefficients should be of the order of 1.
    """
    (a, b), (e, d) = at_most, equal
    p, q, n = len(b), len(d), len(cost)
    if min(b.min(initial=0.0), d.min(initial=0.0)) < 0:
        raise ValueError("expected right-hand sides of at least 0")
    table = np.zeros((p + q, n + p + q + 1))
    table[:p, :n], table[p:, :n] = a, e
    table[:, n : n + p + q] = np.eye(p + q)
    table[:p, -1], table[p:, -1] = b, d
    basis = list(range(n, n + p + q))
    artificial = np.zeros(n + p + q)
    artificial[n + p :] = 1.0
    _improve(table, basis, artificial, n + p + q)
    if artificial[basis] @ table[:, -1] > 1e-7:
        return None
    for row in range(p + q):  # artificial variables that stay at zero must not come back
        columns = np.flatnonzero(np.abs(table[row, : n + p]) > 1e-9)
        if basis[row] >= n + p and len(columns):
            _pivot(table, basis, row, int(columns[0]))
    _improve(table, basis, np.concatenate([cost, np.zeros(p + q)]), n + p)
    x = np.zeros(n + p + q)
    x[basis] = table[:, -1]
    return x[:n]


def _improve(table: Matrix, basis: list[int], cost: Matrix, columns: int) -> None:
    """Pivot among the first `columns` columns until no step lowers the cost.

    The steepest column enters; once that makes no progress, the first one (Bland's rule), which
    cannot cycle.
    """
    idle, best = 0, np.inf
    while True:
        reduced = cost[:columns] - cost[basis] @ table[:, :columns]
        entering = np.flatnonzero(reduced < -_TOLERANCE)
        if not len(entering):
            return
        value = float(cost[basis] @ table[:, -1])
        idle, best = (0, value) if value < best - _TOLERANCE else (idle + 1, best)
        column = int(entering[0] if idle > 20 else reduced.argmin())
        rising = np.flatnonzero(table[:, column] > _TOLERANCE)
        if not len(rising):
            raise ArithmeticError("the linear program has no bound")
        ratios = table[rising, -1] / table[rising, column]
        tied = rising[ratios <= ratios.min() + 1e-13]
        _pivot(table, basis, min(tied.tolist(), key=lambda row: basis[row]), column)


def _pivot(table: Matrix, basis: list[int], row: int, column: int) -> None:
    table[row] /= table[row, column]
    others = np.arange(len(table)) != row
    table[others] -= np.outer(table[others, column], table[row])
    basis[row] = column
