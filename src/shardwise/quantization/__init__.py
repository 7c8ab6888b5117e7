"""Frozen weights in 8 or 4 bits, split over ranks without a change of their values."""

from shardwise.quantization.codes import QUANTIZATIONS as QUANTIZATIONS
from shardwise.quantization.codes import Quantization as Quantization
from shardwise.quantization.codes import check_available as check_available
from shardwise.quantization.product import quantized_linear as quantized_linear
from shardwise.quantization.tensor import QuantizedTensor as QuantizedTensor
from shardwise.quantization.tensor import quantize_shard as quantize_shard
