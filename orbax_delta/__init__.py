"""Delta checkpoints for Orbax: every save writes only what changed of a pytree.

    manager = ocp.CheckpointManager(root, handler_registry=handler_registry())

Names are loaded when they are first used, so that the command line starts without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from orbax_delta import policies as policies
from orbax_delta.errors import ConflictError as ConflictError
from orbax_delta.errors import CorruptionError as CorruptionError
from orbax_delta.errors import DeltaError as DeltaError
from orbax_delta.errors import DisagreementError as DisagreementError
from orbax_delta.errors import FormatError as FormatError
from orbax_delta.errors import InvalidInputError as InvalidInputError
from orbax_delta.errors import NotFoundError as NotFoundError
from orbax_delta.errors import OutOfMemoryError as OutOfMemoryError
from orbax_delta.errors import PeerError as PeerError
from orbax_delta.errors import StorageError as StorageError
from orbax_delta.errors import StructureError as StructureError
from orbax_delta.errors import UnsupportedVersionError as UnsupportedVersionError
from orbax_delta.errors import WrongKeyError as WrongKeyError
from orbax_delta.keys import Encryption as Encryption
from orbax_delta.keys import new_key_file as new_key_file
from orbax_delta.keys import use_key as use_key
from orbax_delta.options import DeltaOptions as DeltaOptions
from orbax_delta.reports import RestoreReport as RestoreReport
from orbax_delta.reports import SaveReport as SaveReport

if TYPE_CHECKING:
    from orbax_delta.archives import ArchiveReport as ArchiveReport
    from orbax_delta.archives import archive as archive
    from orbax_delta.exports import ExportReport as ExportReport
    from orbax_delta.exports import export_delta as export_delta
    from orbax_delta.exports import export_orbax as export_orbax
    from orbax_delta.exports import export_safetensors as export_safetensors
    from orbax_delta.handler import DeltaCheckpointHandler as DeltaCheckpointHandler
    from orbax_delta.handler import DeltaRestore as DeltaRestore
    from orbax_delta.handler import DeltaSave as DeltaSave
    from orbax_delta.handler import handler_registry as handler_registry
    from orbax_delta.handler_v1 import DeltaHandler as DeltaHandler
    from orbax_delta.handler_v1 import DeltaState as DeltaState
    from orbax_delta.handler_v1 import v1_context as v1_context
    from orbax_delta.handler_v1 import v1_release as v1_release
    from orbax_delta.imports import import_checkpoint as import_checkpoint
    from orbax_delta.recovery import restore_base as restore_base
    from orbax_delta.recovery import restore_latest_good as restore_latest_good
    from orbax_delta.steps import save_report as save_report

_LAZY = {
    "ArchiveReport": "archives",
    "DeltaCheckpointHandler": "handler",
    "DeltaHandler": "handler_v1",
    "DeltaRestore": "handler",
    "DeltaSave": "handler",
    "DeltaState": "handler_v1",
    "ExportReport": "exports",
    "archive": "archives",
    "export_delta": "exports",
    "export_orbax": "exports",
    "export_safetensors": "exports",
    "handler_registry": "handler",
    "import_checkpoint": "imports",
    "restore_base": "recovery",
    "restore_latest_good": "recovery",
    "save_report": "steps",
    "v1_context": "handler_v1",
    "v1_release": "handler_v1",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"orbax_delta.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'orbax_delta' has no attribute {name!r}")
