"""Attention to shared prefixes on a GPU."""

import pytest
import torch
from cascaded import check_cascade

pytestmark = pytest.mark.gpu
LENGTHS = (*range(960, 1040, 2), -1, 5, *range(4160, 4200, 4), *range(64, 74))
GROUPS = ((0, 40, 15), (42, 10, 65), (52, 10, 1))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_it_is_exact(dim: int, group: int, dtype: torch.dtype, remote: bool) -> None:
    check_cascade(
        LENGTHS, GROUPS, 2, group, dim, dtype, 1.5e-3 if dtype == torch.float16 else 1.2e-2,
        rope=True, remote=remote, device=torch.device("cuda"), sms=132,
    )  # fmt: skip
