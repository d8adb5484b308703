"""Weights of 4 bits. Of each output, 32 inputs are a group: a weight is its group's scale * number + minimum.

`kernels.group_tile` multiplies them. n outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch

from ppserve.errors import ConfigError
from ppserve.model.checkpoint import FourBits

GROUP_INPUTS = 32
_MOST = 15  # the greatest number


def in_four_bits(weight_nK: torch.Tensor) -> FourBits:
    """Round weights to the nearest of 16 equidistant numbers between their group's least and greatest. K: a
    multiple of 32. Raises ConfigError for weights that float16 cannot hold."""
    weight_nGi = weight_nK.float().view(len(weight_nK), -1, GROUP_INPUTS)
    low_nG, high_nG = weight_nGi.amin(2), weight_nGi.amax(2)
    minima_nG, scales_nG = low_nG.half(), ((high_nG - low_nG) / _MOST).half()
    if not (minima_nG.isfinite().all() and scales_nG.isfinite().all()):
        raise ConfigError("--quantization", "int4 takes weights up to 65504; this model has larger ones")
    steps_nGi = (weight_nGi - minima_nG.float()[:, :, None]) / scales_nG.float()[:, :, None]
    # A group whose weights are all equal has a scale of 0, and its steps are not numbers.
    numbers_nGi = steps_nGi.nan_to_num(0, 0, 0).round().clamp(0, _MOST).to(torch.uint8)
    return FourBits(numbers_nGi, scales_nG, minima_nG)


def words(four_bits: FourBits) -> torch.Tensor:
    """Return (n, 5 G) int32. Each group has 4 words of 8 numbers, of which the first four are in the lower halves
    of the bytes, then one word with the scale in its lower half and the minimum in its upper half."""
    numbers_nGi, scales_nG, minima_nG = four_bits
    halves_nGw24 = numbers_nGi.view(*scales_nG.shape, 4, 2, 4)
    bytes_nGw4 = halves_nGw24[:, :, :, 0] | halves_nGw24[:, :, :, 1] << 4
    pair_nG2 = torch.stack([scales_nG, minima_nG], dim=2)
    both_nG5 = torch.cat([bytes_nGw4.view(torch.int32).flatten(2), pair_nG2.view(torch.int32)], dim=2)
    return both_nG5.flatten(1)
