"""Sizes of transformer blocks, the shapes of their parameters and the names inside.

Does not belong here: anything that computes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """What one transformer block is made of.

    Attributes:
        d_model: Width of the residual stream.
        heads: Query heads.
        kv_heads: Heads of keys and values; each serves `heads / kv_heads` query heads.
        head_dim: Width of a head; even, and for "splash" a multiple of 128.
        ffn_dim: Inner width of the MLP, or of each expert.
        kind: "decoder" is causal, with RMSNorm, RoPE and SwiGLU; "encoder" sees both
            ways, with LayerNorm, GELU and no positions of its own.
        experts: Experts of the MLP; 0 for a dense one. Decoders only.
        experts_per_token: Experts that each token goes to.
        dropout: Rate at which the outputs of attention and MLP are dropped, where the
            block is given a key.
        dtype: Of parameters and activations; norms, softmax and RoPE are float32
            inside.
        attention: "xla" runs anywhere, "cudnn" on NVIDIA GPUs, "splash" on TPUs.
        rope_theta: Base of the rotary frequencies.
        eps: Added to the variance by norms.
        names: Whether values carry their `checkpoint_name`.
    """

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    kind: Literal["decoder", "encoder"] = "decoder"
    experts: int = 0
    experts_per_token: int = 2
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    rope_theta: float = 500_000.0
    eps: float = 1e-5
    names: bool = True

    def __post_init__(self) -> None:
        """Refuse what no block can be built from."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: RoPE turns pairs")
        if self.experts and self.kind == "encoder":
            raise ValueError("only a decoder has experts; leave experts=0")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is not in 1.."
                f"{self.experts}, the number of experts"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")


TINY = BlockConfig(d_model=256, heads=4, kv_heads=2, head_dim=128, ffn_dim=512)
"""For tests on CPUs; of the smallest heads and multiples that all kernels take."""

TINY_MOE = dataclasses.replace(TINY, ffn_dim=256, experts=4)
"""`TINY` with four experts."""

TINY_ENCODER = dataclasses.replace(TINY, kind="encoder", kv_heads=4)
"""`TINY` that sees both ways."""

D2048 = BlockConfig(d_model=2048, heads=16, kv_heads=4, head_dim=128, ffn_dim=5632)
"""A block of a model of one to two billion parameters."""

LLAMA_8B = BlockConfig(d_model=4096, heads=32, kv_heads=8, head_dim=128, ffn_dim=14336)
"""A block of Llama 3 8B."""

MIXTRAL_8X7B = dataclasses.replace(LLAMA_8B, experts=8, rope_theta=1e6)
"""A block of Mixtral 8x7B: two of eight experts for each token."""

ENCODER = BlockConfig(
    d_model=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_dim=4096,
    kind="encoder",
    dropout=0.1,
)
"""A block of the size of BERT large or ViT large."""


def shapes(config: BlockConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a block's parameters, by name, in the order of use.

    Args:
        config: Sizes of the block.

    Returns:
        Shapes; every parameter is of `config.dtype`.
    """
    d, f, hd = config.d_model, config.ffn_dim, config.head_dim
    attention = {
        "query": (d, config.heads, hd),
        "key": (d, config.kv_heads, hd),
        "value": (d, config.kv_heads, hd),
        "out": (config.heads, hd, d),
    }
    if config.kind == "encoder":
        return {
            "attn_norm": (d,),
            "attn_norm_bias": (d,),
            **attention,
            "mlp_norm": (d,),
            "mlp_norm_bias": (d,),
            "wi": (d, f),
            "wo": (f, d),
        }
    expert = (config.experts,) if config.experts else ()
    return {
        "attn_norm": (d,),
        **attention,
        "mlp_norm": (d,),
        **({"router": (d, config.experts)} if config.experts else {}),
        "wi_0": (*expert, d, f),
        "wi_1": (*expert, d, f),
        "wo": (*expert, f, d),
    }


def names(config: BlockConfig) -> tuple[str, ...]:
    """Names of the values inside a block, each given once, in the order of computation.

    They are those of MaxText, so that its lists of names apply; it has no name for
    `encoder_layer_input`, the two norms and `moe_router`.

    Args:
        config: Sizes of the block; whether it has names switched on does not matter.
    """
    projections = ("query_proj", "key_proj", "value_proj")
    attention = ("attention_norm", *projections, "context", "out_proj", "mlp_norm")
    if config.kind == "encoder":
        return ("encoder_layer_input", *attention, "mlpwi", "mlpwo")
    mlp: tuple[str, ...] = ("mlpwi_0", "mlpwi_1", "mlpwo")
    if config.experts:
        mlp = ("moe_router", *(f"moe_{name}" for name in mlp))
    return ("decoder_layer_input", *attention, *mlp)
