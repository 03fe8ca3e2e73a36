"""`jax.checkpoint` policies for transformer blocks on TPU and GPU.

The package is reserved and typed but holds no policy yet.
"""
