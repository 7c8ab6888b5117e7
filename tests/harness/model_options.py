"""Options of configs that small models of many tests have."""

import torch.nn.functional as F

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
# Sizes of models of transformers; three key-value heads are split unevenly over two ranks.
TRANSFORMERS = {
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "pad_token_id": 0,
}
