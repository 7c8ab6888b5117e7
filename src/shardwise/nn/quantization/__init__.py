"""Frozen weights in 8 or 4 bits, split over ranks without a change of their values."""

from shardwise.nn.quantization.codes import QUANTIZATIONS as QUANTIZATIONS
from shardwise.nn.quantization.codes import Quantization as Quantization
from shardwise.nn.quantization.codes import check_available as check_available
from shardwise.nn.quantization.tensor import QuantizedTensor as QuantizedTensor
from shardwise.nn.quantization.tensor import quantize_shard as quantize_shard
from shardwise.nn.quantization.tensor import quantized_linear as quantized_linear
