"""Paths, URLs and specs: what each opens, what the environment adds, what is wrong."""

import os

import pytest

from orbax_delta import locations
from orbax_delta.errors import InvalidInputError
from orbax_delta.locations import Location, complete

S3 = {"driver": "s3", "bucket": "b", "path": "runs/1", "endpoint": "http://host:9000"}
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
ENVIRONMENT = {"type": "environment"}


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/run", "/data/run/"),
        ("/data/run/", "/data/run/"),
        ("/data/../data/run", "/data/run/"),
        ("s3://b/run", "s3://b/run/"),
        ("gs://b/a/../b", "gs://b/a/../b/"),
        ({"driver": "file", "path": "/data/run"}, "/data/run/"),
        ({"driver": "file", "path": "/data/../data/run"}, "/data/run/"),
        ({"driver": "memory", "path": "x"}, "memory://x/"),
        ({"driver": "gcs", "bucket": "b", "path": "runs/"}, "gs://b/runs/"),
        ({"driver": "s3", "bucket": "b"}, "s3://b/"),
        (S3, "s3://b/runs/1/"),
    ],
)
def test_every_kind_has_a_readable_url(given, url):
    """What messages and MANIFESTs show; a folder inside only gets longer."""
    location = Location.of(given)
    assert location.url == url
    assert location.child("a#b/c").url == f"{url}a#b/c/"
    assert location.is_local == url.startswith("/")


def test_folders_inside_keep_the_spec():
    """All fields but the path are passed on; what was given is not changed."""
    given = dict(S3)
    location = Location.of(given)
    given["endpoint"] = "changed"
    inside = location.child("_delta_store").child("packs")
    assert inside.spec == {**S3, "path": "runs/1/_delta_store/packs/"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has driver None; expected one of file, memory, s3, gcs"),
        ({"driver": "zip"}, "has driver 'zip'; expected one of"),
        ({"driver": "s3", "path": "a"}, "has bucket None; expected its name"),
        ({"driver": "gcs", "bucket": ""}, "has bucket ''; expected its name"),
        ({"driver": "file", "path": 3}, "has path 3; expected text"),
        ({"driver": "file", "path": "a\\b"}, "has a backslash"),
        ({**S3, "aws_region": {1, 2}}, "is not JSON"),
        ("/data/a\\b", "has a backslash"),
    ],
)
def test_what_cannot_hold_a_store(given, message):
    """Named with what was expected."""
    with pytest.raises(InvalidInputError, match=message):
        Location.of(given)


def test_a_url_alone():
    """Amazon itself: TensorStore looks for keys and for the bucket's region."""
    assert complete("s3://b/run/") == {"driver": "s3", "bucket": "b", "path": "run/"}
    assert complete("gs://b/run/") == "gs://b/run/"
    assert complete("memory://run/") == "memory://run/"


@pytest.mark.parametrize(
    ("variables", "added"),
    [
        ({"AWS_ENDPOINT_URL": "http://a:1/"}, {"endpoint": "http://a:1"}),
        (
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"},
            {"endpoint": "http://b"},
        ),
        (
            {"AWS_ENDPOINT_URL": "http://a", "AWS_DEFAULT_REGION": "x"},
            {"endpoint": "http://a", "aws_region": "x"},
        ),
        (
            {
                "AWS_ENDPOINT_URL": "http://a",
                "AWS_DEFAULT_REGION": "x",
                "AWS_REGION": "y",
            },
            {"endpoint": "http://a", "aws_region": "y"},
        ),
        ({"AWS_REGION": "not the bucket's"}, {}),
        (KEYS, {"aws_credentials": ENVIRONMENT}),
        ({"AWS_ACCESS_KEY_ID": "id"}, {}),
        ({"AWS_ENDPOINT_URL": ""}, {}),
    ],
)
def test_what_the_environment_says_of_a_url(monkeypatch, variables, added):
    """The names and their order are those of Amazon's own tools."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanted = {"driver": "s3", "bucket": "b", "path": "run/", **added}
    assert complete("s3://b/run/") == wanted


def test_a_spec_says_all_but_the_keys(monkeypatch):
    """An endpoint of the environment is for URLs; its keys are for all."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    assert complete(S3) == S3
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    assert complete(S3) == {**S3, "aws_credentials": ENVIRONMENT}
    anonymous = {**S3, "aws_credentials": {"type": "anonymous"}}
    assert complete(anonymous) == anonymous
    local = {"driver": "file", "path": "/data/"}
    assert complete(local) == local


@pytest.mark.parametrize(
    ("url", "expected"),
    [("s3://b/", "AWS_ACCESS_KEY_ID"), ("gs://b/", "gcloud auth"), ("/data/", "")],
)
def test_remedies(url, expected):
    """A refusal says what to do about it; any other failure does not guess."""
    for reason in ("PERMISSION_DENIED: no", "Failed to get credentials: none"):
        assert expected in locations.remedy(f"write {url}key", reason)
    assert locations.remedy(f"write {url}key", "UNAVAILABLE: down") == ""
    assert (locations.remedy(f"write {url}key", "PERMISSION_DENIED") == "") == (
        not expected
    )
