"""Files in object stores: what arrives, and what is said when a store fails."""

import os
from pathlib import Path

import pytest
from s3_server import s3_bucket

from zerojax.run import object_store
from zerojax.run.object_store import ObjectStore, StoreError


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_files_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str) -> None:
    monkeypatch.setattr(object_store, "PIECE", 1000)
    files = {"a/large": os.urandom(2500), "a/even": os.urandom(2000), "b": b"", "c": b"x"}
    here, there = tmp_path / "here", tmp_path / "there"
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    with s3_bucket(monkeypatch):
        store = ObjectStore("s3://bucket/x" if scheme == "s3" else f"file://{tmp_path}/store")
        store.upload(here, sizes, "p/")
        pieces = ["p/a/even", "p/a/even.piece-1", "p/a/large", "p/a/large.piece-1", "p/a/large.piece-2"]
        assert store.names("p/") == [*pieces, "p/b", "p/c"]
        store.download(there, sizes, "p/")
        assert {name: (there / name).read_bytes() for name in files} == files
        store.delete("p/a/")
        assert (store.names(""), store.read("p/c"), store.read("p/d")) == (["p/b", "p/c"], b"x", None)
        with pytest.raises(StoreError, match="p/a/large is missing"):
            store.download(there, {"a/large": 5}, "p/")
        for name in ("../x", "/x"):
            with pytest.raises(StoreError, match="would be written outside of"):
                store.download(there, {name: 1}, "p/")


def test_the_reason_of_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        object_store, "_QUICK", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    )
    with s3_bucket(monkeypatch) as bucket:
        with pytest.raises(StoreError, match=r"^s3://other/x: NoSuchBucket: No bucket$"):
            ObjectStore("s3://other/x", patient=False).write("a", b"")
        store = ObjectStore("s3://bucket/x", patient=False)
        for status, words in ((403, r"permission denied \(HTTP 403\)"), (503, r"aborted \(HTTP 503\)")):
            bucket.status = status
            with pytest.raises(StoreError, match=f"^s3://bucket/x: {words}"):
                store.write("a", b"")
