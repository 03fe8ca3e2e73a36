"""A whole small language model: embedding, layers under a policy, loss, gradients."""

import dataclasses

import jax
import jax.numpy as jnp

import remat_policies as rp
from remat_policies.demo import TINY, pure

CONFIG = dataclasses.replace(
    TINY, d_model=512, heads=4, kv_heads=2, head_dim=128, ffn_dim=1536
)
LAYERS, SHAPE, WORDS = 16, (2, 512), 1024


def avals(config=CONFIG, layers=LAYERS, shape=SHAPE):
    """Weights and tokens."""
    params, _ = pure.avals(config, 1, 1, layers=layers)
    table = jax.ShapeDtypeStruct((WORDS, config.d_model), config.dtype)
    tokens = jax.ShapeDtypeStruct((shape[0], shape[1] + 1), jnp.int32)
    return {"table": table, "layers": params}, tokens


def make_step(policy, config=CONFIG):
    """From a policy to the gradient of the loss."""

    def body(x, layer):
        return pure.apply(config, layer, x), None

    return gradient(lambda x, layers: rp.scan_layers(body, x, layers, policy)[0])


def gradient(stack):
    """The gradient of the loss of a model with such layers."""

    def loss(weights, tokens):
        x = weights["table"][tokens[:, :-1]]
        y = stack(x, weights["layers"])
        logits = jnp.einsum(
            "bsd,vd->bsv", y, weights["table"], preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

    return jax.grad(loss)
