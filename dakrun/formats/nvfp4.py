"""NVFP4: e2m1 elements, an e4m3 scale per 16 columns and a float32 scale for the whole weight.

compressed-tensors stores `weight_packed` and `weight_global_scale`, by which scales are divided;
ModelOpt `weight` and `weight_scale_2`, by which they are multiplied. A byte has two elements, the
lower half first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import Part, Stored, check_divides

if TYPE_CHECKING:
    import torch

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(Stored):
    """Elements of 4 bits; the scale of a weight `divides` or multiplies.

    An element is code * (scale * factor) in float32; the factor of a scale that divides is its
    reciprocal in float32, as in vLLM.
    """

    divides: bool = True

    @property
    def name(self) -> str:
        """What people call it."""
        return "NVFP4"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """Elements, a scale for each group, and that of the weight."""
        elements, scale = (
            ("weight_packed", "weight_global_scale")
            if self.divides
            else ("weight", "weight_scale_2")
        )
        return (
            Part(elements, (rows, cols // 2), ("U8",)),
            Part("weight_scale", (rows, cols // GROUP), ("F8_E4M3",)),
            Part(scale, (1,), ("F32",), 0),
        )

    def layout(self, dtype: str, cols: int) -> Quantised:
        """e2m1 with e4m3 scales per 16 columns and a float32 factor per row."""
        check_divides(GROUP, cols)
        return Quantised("e2m1", GROUP, 1)

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The unpacked codes, the scales as they are, and the factor of each row."""
        import torch

        packed, scales, of_all = tensors
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        factor = 1 / of_all if self.divides else of_all
        return codes, scales, factor.expand(len(packed))
