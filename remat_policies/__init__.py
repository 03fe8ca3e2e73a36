"""`jax.checkpoint` policies for transformer blocks on TPU and GPU.

`remat(block, "minimal")` is the block whose backward pass keeps its matrix products and
computes the rest again; `report(block, *avals, policy=...)` says what that costs.
`remat_policies.linen` and `remat_policies.nnx` do the same with Flax modules.
"""

from remat_policies import blocknames as blocknames
from remat_policies.applying import remat as remat
from remat_policies.applying import scan_layers as scan_layers
from remat_policies.batches import LargestBatch as LargestBatch
from remat_policies.batches import largest_batch as largest_batch
from remat_policies.compiled import Compiled as Compiled
from remat_policies.compiled import OutOfMemory as OutOfMemory
from remat_policies.devices import DEVICES as DEVICES
from remat_policies.devices import Device as Device
from remat_policies.devices import device as device
from remat_policies.errors import CompilerMissingError as CompilerMissingError
from remat_policies.errors import GradientMismatchError as GradientMismatchError
from remat_policies.errors import InvalidInputError as InvalidInputError
from remat_policies.errors import OverBudgetError as OverBudgetError
from remat_policies.errors import RematError as RematError
from remat_policies.errors import RematWarning as RematWarning
from remat_policies.errors import UnknownNameError as UnknownNameError
from remat_policies.fits import Fit as Fit
from remat_policies.fitting import fit as fit
from remat_policies.frontiers import Frontier as Frontier
from remat_policies.frontiers import frontier as frontier
from remat_policies.frontiers import mix as mix
from remat_policies.gradients import check_grads as check_grads
from remat_policies.lints import lint as lint
from remat_policies.planning import plan as plan
from remat_policies.plans import Mixture as Mixture
from remat_policies.plans import Plan as Plan
from remat_policies.plans import load_plan as load_plan
from remat_policies.policies import Policy as Policy
from remat_policies.policies import all_of as all_of
from remat_policies.policies import any_of as any_of
from remat_policies.policies import from_json as from_json
from remat_policies.policies import names as names
from remat_policies.presets import PRESETS as PRESETS
from remat_policies.presets import preset as preset
from remat_policies.report import report as report
from remat_policies.suiting import Choice as Choice
from remat_policies.suiting import for_device as for_device
from remat_policies.verify import verify as verify
