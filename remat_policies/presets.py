"""Policies by name, from all kept to all recomputed.

The order is that of memory: `none` keeps most. Figures for bytes are of a block with
RMSNorm, rotary positions, grouped-query attention by a kernel and a gated MLP, in
bf16: `d` the model's width, `a` of all heads, `k` of the key-value heads, `f` of the
MLP's hidden layer. Does not belong here: how a policy is applied.
"""

from remat_policies import blocknames as n
from remat_policies.errors import InvalidInputError, closest
from remat_policies.policies import AUTO, Policy

_ATTENTION = (*n.QKV_PROJECTIONS, n.OUT)
_MATMULS = (*_ATTENTION, *n.MLP_HIDDEN, n.MLP_OUT, *n.MOE_HIDDEN, n.MOE_OUT)
_ANY_MATMUL = (f"{AUTO}matmul/*",)
_ANY_KERNEL = (f"{AUTO}kernel/*",)


def _preset(
    label: str,
    save: tuple[str, ...] = (),
    *,
    offload: tuple[str, ...] = (),
    unnamed: tuple[str, ...] = (),
) -> Policy:
    return Policy(
        label=label, save=save, offload=offload, unnamed=unnamed, strict=False
    )


none = Policy(label="none", remat=False)
"""Nothing is recomputed. jax keeps also float32 temporaries: 64d bytes a token."""
selective = _preset(
    "selective",
    (*_MATMULS, n.CONTEXT, *n.NORMS, n.MOE_ROUTER),
    unnamed=(*_ANY_MATMUL, *_ANY_KERNEL),
)
"""As Megatron: only the core of attention and activation functions are done again."""
minimal_with_context = _preset(
    "minimal_with_context",
    (*_MATMULS, n.CONTEXT),
    unnamed=(*_ANY_MATMUL, *_ANY_KERNEL),
)
"""No matrix product and no attention is done twice: 2d + 2(a + 2k) + 2a + 2d + 4f."""
minimal = _preset("minimal", _MATMULS, unnamed=_ANY_MATMUL)
"""Matrix products are kept, attention is done again: 2d + 2(a + 2k) + 2d + 4f."""
save_dot_with_context_except_mlp = _preset(
    "save_dot_with_context_except_mlp", (*_ATTENTION, n.CONTEXT)
)
"""All of attention is kept, the MLP is done again: 2d + 2(a + 2k) + 2a + 2d."""
save_dot_except_mlp = _preset("save_dot_except_mlp", _ATTENTION)
"""Attention's projections: 2d + 2(a + 2k) + 2d."""
moe_save_experts = _preset("moe_save_experts", (*n.MOE_HIDDEN, n.MOE_ROUTER))
"""The experts' products are kept, attention is done again."""
moe_save_dispatch = _preset("moe_save_dispatch", (*_ATTENTION, n.MOE_ROUTER))
"""Attention and routing are kept, the experts are done again."""
save_qkv_proj = _preset("save_qkv_proj", n.QKV_PROJECTIONS)
"""Queries, keys and values: 2d + 2(a + 2k)."""
save_out_proj = _preset("save_out_proj", (n.OUT,))
"""Attention's result: 4d, and attention is still done again, for its own backward."""
full = Policy(label="full", strict=False)
"""All is recomputed from the block's input: 2d, three quarters of a forward more."""
minimal_offloaded = _preset("minimal_offloaded", offload=_MATMULS, unnamed=_ANY_MATMUL)
"""As `minimal`, in the host's memory."""
qkv_proj_offloaded = _preset("qkv_proj_offloaded", offload=n.QKV_PROJECTIONS)
"""As `save_qkv_proj`, in the host's memory."""
layer_input_offloaded = _preset("layer_input_offloaded", offload=(n.LAYER_INPUT,))
"""As `full`, the block's input too in the host's memory."""

PRESETS = {
    preset.label: preset
    for preset in (
        none,
        selective,
        minimal_with_context,
        minimal,
        save_dot_with_context_except_mlp,
        save_dot_except_mlp,
        moe_save_experts,
        moe_save_dispatch,
        save_qkv_proj,
        save_out_proj,
        full,
        minimal_offloaded,
        qkv_proj_offloaded,
        layer_input_offloaded,
    )
}


def preset(name: str) -> Policy:
    """The policy of this name.

    Example:
        >>> preset("minimal")
        minimal

    Raises:
        InvalidInputError: There is none; the message says which are like it.
    """
    if name not in PRESETS:
        raise InvalidInputError(
            f"no preset is called {name!r}: {closest(name, PRESETS)}"
        )
    return PRESETS[name]
