"""What `make test` leaves to `make test-more`: combinations by a mark, examples by a profile.

Each test has all of its cases where it is, and says which of them `make test` runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def cases(every: Iterable[tuple[Any, ...]], few: Callable[..., bool]) -> list[Any]:
    """Arguments for parametrize, those for which not `few(*arguments)` marked `full`."""
    return [pytest.param(*case, marks=[] if few(*case) else [pytest.mark.full]) for case in every]


def few_examples(count: int) -> settings:
    """Settings of a law whose examples take long: `make test` tries `count`, not 50."""
    default = settings.default.max_examples
    return settings(max_examples=count if settings.get_current_profile_name() == "few" else default)
