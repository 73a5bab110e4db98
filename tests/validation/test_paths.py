"""Folders that cannot hold checkpoints are refused before anything is written."""

from pathlib import Path

import pytest

from zerojax.errors import ConfigurationError
from zerojax.validation.paths import check_checkpoint_path, is_store_url


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/run", "s3:// names an object store"),
        ("gs://bucket", "gs:// names an object store"),
        ("runs/a*", "whose path has one of"),
        ("runs/a\\b", "whose path has one of"),
    ],
)
def test_they_are_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_checkpoint_path(Path(path))


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b-1", "gs://my.bucket/a", "file:///a/b"])
def test_urls_of_stores_are_known(url: str) -> None:
    assert is_store_url(url)
    for other in (url[:4] + url[5:], f"{url}?x", f"{url} ", f"x{url}", "file://a", "s3://", "runs/a"):
        assert not is_store_url(other)


@pytest.mark.parametrize("path", ["runs/a", "/a/s3:/b", "."])
def test_others_are_not(path: str) -> None:
    check_checkpoint_path(Path(path))
