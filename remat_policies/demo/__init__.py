"""Transformer blocks to learn, test and measure rematerialisation on.

The same mathematics as pure functions (`pure`) and, with the extra `demo`, as Flax
modules (`linen_blocks`, `nnx_blocks`, which are not imported from here).
"""

from remat_policies.demo.values import D2048 as D2048
from remat_policies.demo.values import ENCODER as ENCODER
from remat_policies.demo.values import LLAMA_8B as LLAMA_8B
from remat_policies.demo.values import MIXTRAL_8X7B as MIXTRAL_8X7B
from remat_policies.demo.values import TINY as TINY
from remat_policies.demo.values import TINY_ENCODER as TINY_ENCODER
from remat_policies.demo.values import TINY_MOE as TINY_MOE
from remat_policies.demo.values import BlockConfig as BlockConfig
