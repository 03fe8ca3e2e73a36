"""Where a folder lies: a path, a URL, or a TensorStore spec; and what opens it.

Orbax's own files go through other libraries than ours, so a URL of a bucket means what
the environment makes of it for all of them. Does not belong here: opening anything.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from orbax_delta import errors

_SCHEMES = {"s3": "s3", "gcs": "gs"}
_DRIVERS = ("file", "memory", *_SCHEMES)
_S3_SCHEME = "s3://"
_URLS = ("file://", "memory://", "gs://", _S3_SCHEME)

# TensorStore's own default is 32 attempts, up to 32 s apart: a quarter of an hour until
# somebody reads that a password is wrong. These are 100 s, and the attempts themselves.
_RETRIES = {"max_retries": 12, "initial_delay": "200ms", "max_delay": "20s"}
RETRIES: Mapping[str, Mapping[str, Any]] = {
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}
"""How long a bucket that fails is asked again, as TensorStore context resources."""

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN_VARIABLE = "AWS_SESSION_TOKEN"

_REMEDIES = {
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN too for "
        "temporary ones) or a profile in ~/.aws, for a key that may list, read, write "
        "and delete in this bucket; for other storage than Amazon's set "
        "AWS_ENDPOINT_URL and AWS_REGION too"
    ),
    "gs": (
        "Run `gcloud auth application-default login`, or set "
        "GOOGLE_APPLICATION_CREDENTIALS to the key of a service account that may list, "
        "read, write and delete in this bucket"
    ),
}
_REFUSALS = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "AccessDenied",
    "credentials",
    "http_response_code='401'",
    "http_response_code='403'",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A folder's place.

    Attributes:
        url: It as a path or URL, ending in `/`, for people and for names.
        spec: The TensorStore spec it was given as; None for a path or URL, whose
            meaning is read off the environment whenever it is opened.
    """

    url: str
    spec: Mapping[str, Any] | None

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> "Location":
        """What a user wrote.

        Raises:
            InvalidInputError: It is no path, URL or spec that can hold a store.
        """
        if isinstance(given, str):
            return cls(url=_folder(_checked_path(given)), spec=None)
        driver, path = given.get("driver"), given.get("path", "")
        if driver not in _DRIVERS:
            raise _refused(given, "driver", f"one of {', '.join(_DRIVERS)}")
        if type(path) is not str:
            raise _refused(given, "path", "text")
        if driver == "file":
            path = _checked_path(path)
        try:
            json.dumps(spec := {**given, "path": _folder(path) if path else ""})
        except (TypeError, ValueError) as error:
            raise errors.InvalidInputError(
                f"the storage {dict(given)!r} is not JSON: {error}"
            ) from error
        return cls(url=_url(driver, spec), spec=spec)

    def child(self, name: str) -> "Location":
        """The folder `name` inside it."""
        if self.spec is None:
            return Location.of(self.url + name)
        return Location.of({**self.spec, "path": f"{self.spec['path']}{name}"})

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine's file systems."""
        return is_local(self.url)


def is_known(url: str) -> bool:
    """Whether a url is of a kind that can hold a root.

    TensorStore opens others too, such as `http`, and asks those for a quarter of an
    hour where nobody answers.
    """
    return url.startswith(_URLS)


def is_local(url: str) -> bool:
    """Whether a url is a path of this machine's file systems."""
    return "://" not in url


def _folder(path: str) -> str:
    return path if path.endswith("/") else path + "/"


def _checked_path(path: str) -> str:
    if not is_local(path):
        if not is_known(path):
            raise errors.InvalidInputError(
                f"could not open {path}: expected a path, or a URL that begins with "
                f"{', '.join(_URLS)}"
            )
        return path
    if "\\" in path:
        raise errors.InvalidInputError(
            f"{path!r} has a backslash, which TensorStore takes for a slash; choose "
            "another folder"
        )
    return os.path.realpath(path) if ".." in path.split("/") else path


def _refused(
    spec: Mapping[str, Any], field: str, expected: str
) -> errors.InvalidInputError:
    return errors.InvalidInputError(
        f"the storage {dict(spec)!r} has {field} {spec.get(field)!r}; expected "
        f"{expected}"
    )


def _url(driver: str, spec: Mapping[str, Any]) -> str:
    path: str = spec["path"]
    if driver == "file":
        return path
    if driver == "memory":
        return f"memory://{path}"
    bucket = spec.get("bucket")
    if type(bucket) is not str or not bucket:
        raise _refused(spec, "bucket", "its name")
    return f"{_SCHEMES[driver]}://{bucket}/{path}"


def complete(spec: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """A URL or spec with what the environment says about it.

    The variables are those that the AWS tools agree on; TensorStore itself reads only
    some of them.
    """
    if isinstance(spec, str):
        if not spec.startswith(_S3_SCHEME):
            return spec
        bucket, _, path = spec.removeprefix(_S3_SCHEME).partition("/")
        return complete({"driver": "s3", "bucket": bucket, "path": path, **_address()})
    named = all(os.environ.get(name) for name in _KEY_VARIABLES)
    if spec["driver"] == "s3" and named and "aws_credentials" not in spec:
        # What its chain of providers would find first, without complaints about the
        # others on standard error.
        return {**spec, "aws_credentials": {"type": "environment"}}
    return spec


def keys() -> tuple[str | None, ...]:
    """The keys in the environment now: temporary ones are replaced while a job runs."""
    return tuple(map(os.environ.get, (*_KEY_VARIABLES, _TOKEN_VARIABLE)))


def _address() -> Mapping[str, str]:
    endpoint = _first(ENDPOINT_VARIABLES)
    if endpoint is None:
        # Amazon's own: the region that counts is the bucket's, and TensorStore asks.
        return {}
    region = _first(REGION_VARIABLES)
    found = {"endpoint": endpoint.rstrip("/")}
    return found | ({"aws_region": region} if region else {})


def _first(variables: tuple[str, ...]) -> str | None:
    return next(filter(None, map(os.environ.get, variables)), None)


def remedy(what: str, reason: str) -> str:
    """What to do about a refusal of a bucket; empty for other failures.

    >>> remedy("write s3://bucket/key", "INTERNAL: Failed to get credentials")[:21]
    '. Set AWS_ACCESS_KEY_'
    >>> remedy("write /data/key", "Permission denied")
    ''
    """
    for scheme, text in _REMEDIES.items():
        if f" {scheme}://" in what and any(word in reason for word in _REFUSALS):
            return f". {text}"
    return ""
