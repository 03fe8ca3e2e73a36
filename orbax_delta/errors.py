"""The exception tree, by what the caller can do about it.

Every error says what was attempted, on which step, leaf or file, what was found, what
was expected and what to do. `kind` is a stable name for machines and `exit_code` is
what the command line returns. Does not belong here: anything that decides *when* to
raise.
"""

from typing import ClassVar


class DeltaError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        restorable: Where a step is damaged: the newest step that restores, if known.
    """

    kind: ClassVar[str] = "delta_error"
    exit_code: ClassVar[int] = 1
    restorable: int | None = None

    def __str__(self) -> str:
        # OSError and KeyError format their arguments in their own ways; a message is
        # a message whatever builtin the class also is.
        return str(self.args[0]) if self.args else ""


class InvalidInputError(DeltaError, ValueError):
    """The call itself is wrong: an option, a leaf, a target, a path. Mend the call."""

    kind = "invalid_input"
    exit_code = 2


class StructureError(InvalidInputError):
    """The target's leaves, shapes or kinds do not fit what the step holds."""

    kind = "structure"


class NotFoundError(DeltaError, FileNotFoundError):
    """A step, an item or the store it needs is not where it was looked for."""

    kind = "not_found"
    exit_code = 10


class ConflictError(DeltaError):
    """Another process took something away that this one was using. Save again."""

    kind = "conflict"
    exit_code = 12


class PeerError(DeltaError):
    """Another process of the job did not answer in time. See what holds it up.

    Not a TimeoutError: Orbax takes those for its own and replaces their words.
    """

    kind = "peer"


class DisagreementError(DeltaError):
    """The processes of the job do not save the same state to the same place."""

    kind = "disagreement"


class FormatError(DeltaError):
    """A file is not what its name says: wrong magic, field or length."""

    kind = "format"
    exit_code = 20


class UnsupportedVersionError(FormatError):
    """A file was written by a newer format. Upgrade the package to read it."""

    kind = "unsupported_version"
    exit_code = 21


class CorruptionError(DeltaError):
    """Stored bytes are readable but wrong, or a named file is missing."""

    kind = "corruption"
    exit_code = 22


class WrongKeyError(DeltaError):
    """The key is missing, is another one, or is none. Give the right one.

    What it was to open is not damaged, as far as anybody can tell.
    """

    kind = "wrong_key"
    exit_code = 13


class OutOfMemoryError(DeltaError, MemoryError):
    """This machine has no room for it. Ask for fewer leaves, or for less of them."""

    kind = "out_of_memory"


class StorageError(DeltaError, OSError):
    """The storage refused an operation (full, denied, unreachable). Often passes."""

    kind = "storage"
    exit_code = 30
