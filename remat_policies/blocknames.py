"""The names that a transformer block gives its values, aligned with MaxText's.

A block marks a value with `checkpoint_name(value, blocknames.CONTEXT)` (of
`jax.ad_checkpoint`); policies then speak of it by that name. Does not belong here:
what policies do.
"""

LAYER_INPUT = "decoder_layer_input"
"""The residual stream as it enters the block: [batch, length, model]."""
ATTENTION_NORM = "attention_norm"
"""The normalised stream that attention's projections read."""
MLP_NORM = "mlp_norm"
"""The normalised stream that the MLP reads."""
QUERY = "query_proj"
"""Queries after projection: [batch, length, heads, head]."""
KEY = "key_proj"
"""Keys after projection: [batch, length, kv heads, head]."""
VALUE = "value_proj"
"""Values after projection: [batch, length, kv heads, head]."""
QKV = "qkv_proj"
"""Queries, keys and values of a fused projection."""
CONTEXT = "context"
"""What attention gives, before its output projection."""
OUT = "out_proj"
"""Attention's output projection: [batch, length, model]."""
MLP_GATE = "mlpwi_0"
"""The gate of a gated MLP, before its activation: [batch, length, hidden]."""
MLP_UP = "mlpwi_1"
"""The other factor of a gated MLP: [batch, length, hidden]."""
MLP_IN = "mlpwi"
"""The hidden layer of an MLP without gate, before its activation."""
MLP_OUT = "mlpwo"
"""The MLP's output; the backward pass of a pre-norm block does not need it."""
MOE_ROUTER = "moe_router"
"""The router's logits: [tokens, experts]."""
MOE_GATE = "moe_mlpwi_0"
"""The experts' gates, before their activation."""
MOE_UP = "moe_mlpwi_1"
"""The experts' other factors."""
MOE_OUT = "moe_mlpwo"
"""The experts' outputs, before they are weighted and summed."""

QKV_PROJECTIONS = (QUERY, KEY, VALUE, QKV)
NORMS = (ATTENTION_NORM, MLP_NORM)
MLP_HIDDEN = (MLP_GATE, MLP_UP, MLP_IN)
MOE_HIDDEN = (MOE_GATE, MOE_UP)
