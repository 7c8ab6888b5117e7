"""Frozen weights in 8 or 4 bits, split over ranks without a change of their values."""

from shardwise.nn.quantization.codes import (
    QUANTIZATIONS as QUANTIZATIONS,
    Quantization as Quantization,
    check_available as check_available,
)
from shardwise.nn.quantization.tensor import (
    QuantizedTensor as QuantizedTensor,
    quantize_shard as quantize_shard,
    quantized_linear as quantized_linear,
)
