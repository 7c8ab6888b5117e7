"""Options of configs that small models of many tests have."""

import torch.nn.functional as F

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
