"""The receiver's side of the format: patches are exact, and a damaged one is refused."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from engine_source import MANIFEST, NumpySource
from patch_encoder import encode

from zerojax.interop.engines import receiver
from zerojax.interop.engines.receiver.__main__ import Post, main
from zerojax.interop.engines.receiver.channel import Channel, split_address
from zerojax.interop.engines.receiver.ends import Feed, Receiver
from zerojax.interop.engines.receiver.manifest import Manifest
from zerojax.interop.engines.receiver.mirror import Mirror
from zerojax.interop.engines.receiver.patches import (
    FULL,
    Patch,
    PatchError,
    changed_checksums,
    checksums,
    decode,
    full,
)

SIZE = 20_000


def pair(dtype, share, most, seed=0):
    """Elements of all bit patterns before and after a change of a share of them."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, SIZE, dtype, endpoint=True)
    step = (rng.integers(1, most + 1, SIZE) * rng.choice([-1, 1], SIZE)).astype(dtype)
    return old, np.where(rng.random(SIZE) < share, old + step, old)


def applied(patch, old):
    if patch.before == FULL:
        return np.frombuffer(patch.body, old.dtype)
    places, differences = decode(patch, old.size, old.itemsize)
    new = old.copy()
    new[places] += differences
    assert changed_checksums(checksums(old), places, old[places], new[places]) == patch.sums
    return new


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0, 1 / SIZE, 0.01, 0.2, 1])
@pytest.mark.parametrize("most", [1, 60, 2**62])
def test_a_patch_is_exact(dtype, share, most):
    old, new = pair(dtype, share, most)
    patch = Patch.of(encode(old, new, 5, 6, 7).to_bytes())
    assert np.array_equal(applied(patch, old), new)
    assert patch.sums == checksums(new)


def test_bytes_of_a_changed_weight():
    sizes = {}
    for share in (0.001, 0.01, 0.1):
        pairs = [pair(np.uint16, share, 1, seed) for seed in range(20)]
        old, new = (np.concatenate(x) for x in zip(*pairs, strict=True))
        sizes[share] = len(encode(old, new, 0, 0, 1).to_bytes()) / (old != new).sum()
    assert sizes[0.001] < 1.9
    assert sizes[0.01] < 1.3
    assert sizes[0.1] < 0.86


def test_the_checksums_are_those_that_the_page_defines():
    values = np.array([3, 5, 7], np.uint16)

    def factor(j):
        x = j * 0x9E3779B1 % 2**32
        x = (x ^ x >> 15) * 0x85EBCA77 % 2**32
        return (x ^ x >> 13) | 1

    words = 3 | 5 << 16, 7
    one = sum(factor(j) * w for j, w in enumerate(words)) % 2**32
    other = sum(factor(2**32 - 1 - j) * w for j, w in enumerate(words)) % 2**32
    assert checksums(values) == (one, other)


def test_a_damaged_patch_is_refused():
    old, new = pair(np.uint16, 0.01, 1)
    whole = encode(old, new, 5, 6, 7).to_bytes()
    with pytest.raises(PatchError, match="cut off"):
        Patch.of(whole[:30])
    with pytest.raises(PatchError, match="positions"):
        decode(Patch.of(whole[:-8]), old.size, 2)
    with pytest.raises(PatchError, match="changes element"):
        decode(Patch.of(whole), old.size // 2, 2)
    with pytest.raises(PatchError, match="header"):
        decode(Patch.of(whole[:37] + b"\xff" + whole[38:]), old.size, 2)


def read(folder):
    """The tensors of a folder, as unsigned integers, with their shapes."""
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    del header["__metadata__"]
    return {
        name: np.frombuffer(data[end:], np.uint16)[slice(*(x // 2 for x in about["data_offsets"]))].reshape(
            about["shape"]
        )
        for name, about in header.items()
    }


def holds(folder, source):
    found = read(folder)
    return all(np.array_equal(found[name], x) for name, x in source.expected().items())


def started(folder, source, kind=Mirror):
    """A mirror, without a network, at the first version of a source."""
    mirror = kind(folder)
    session, manifest, _ = source.description()
    mirror.begin(session, Manifest(manifest))
    for patch in source.step():
        mirror.apply(session, patch)
    return mirror


def reached(feed, version, seconds=10.0):
    limit = time.monotonic() + seconds
    while feed.serving < version and time.monotonic() < limit:
        time.sleep(0.005)
    return feed.serving == version


def test_a_version_is_visible_once_all_of_it_is_there(tmp_path):
    source = NumpySource()
    mirror = started(tmp_path, source)
    current = tmp_path / "current"
    for version in range(1, 6):
        before = read(current)
        one, other = source.step()
        mirror.apply("1", one)
        assert all(np.array_equal(read(current)[name], x) for name, x in before.items())
        mirror.apply("1", other)
        assert holds(current, source)
        assert json.loads((current / "zerojax.json").read_text()) == {"session": "1", "version": version}
    assert (current / "config.json").read_text() == "{}\n"


@pytest.mark.parametrize("fault", ["replayed", "skipped", "truncated", "another base", "no piece", "old job"])
def test_a_patch_that_does_not_fit_changes_nothing(tmp_path, fault):
    source = NumpySource()
    mirror = started(tmp_path, source)
    one, other = source.step()
    expected = source.expected()
    session = "1"
    if fault == "replayed":
        mirror.apply("1", one)
        bad, message = one, "sent before"
    elif fault == "skipped":
        bad, message = source.step()[0], "is at version 0, not 1"
    elif fault == "truncated":
        bad, message = replace(one, body=one.body[:-4]), "positions"
    elif fault == "another base":
        bad, message = NumpySource(seed=3), "checksums"
        bad.step()
        bad = replace(bad.step()[0], piece=0)
    elif fault == "no piece":
        bad, message = replace(one, piece=2), "no piece 2"
    else:
        bad, message, session = one, "is over", "0"
    with pytest.raises(PatchError, match=message):
        mirror.apply(session, bad)
    assert mirror.version == 0
    if fault == "skipped":
        return
    if fault == "another base":  # the piece is asked for in full
        assert mirror.versions([0, 1]) == [FULL, 0]
        one = full(source.pieces()[0], 0, 1)
    for patch in (other,) if fault == "replayed" else (one, other):
        mirror.apply("1", patch)
    assert all(np.array_equal(read(tmp_path / "current")[name], x) for name, x in expected.items())


def test_a_job_whose_model_the_engine_refuses_changes_nothing(tmp_path):
    class Refusing(Mirror):
        def _start(self, session, manifest, version):
            if session == "2":
                raise PatchError("another model")
            super()._start(session, manifest, version)

    source = NumpySource()
    mirror = started(tmp_path, source, Refusing)
    assert mirror.manifest is not None
    for _ in range(2):
        with pytest.raises(PatchError, match="another model"):
            mirror.begin("2", mirror.manifest)
    for patch in source.step():
        mirror.apply("1", patch)
    assert holds(tmp_path / "current", source)


def test_a_job_that_sends_codes_to_an_engine_with_full_weights_is_refused(tmp_path):
    """vLLM would read the codes as full weights without an error."""
    source = NumpySource()
    asked = []
    mirror = started(tmp_path, source, lambda folder: Mirror(folder, [asked.append]))
    manifest = MANIFEST | {"tensors": [[name, "F8_E4M3", shape] for name, _, shape in MANIFEST["tensors"]]}
    fp8 = Manifest(json.dumps(manifest).encode())
    for receiving in (mirror, Mirror(tmp_path, [asked.append])):  # also after a restart of the receiver
        with pytest.raises(
            PatchError, match=f"sends F8_E4M3 weights, .* with full ones .* delete {tmp_path}"
        ):
            receiving.begin("2", fp8)
        assert receiving.session == "1"
    assert len(asked) == 1
    Mirror(tmp_path).begin("2", fp8)  # no engine is told


def test_strangers_are_refused_in_both_directions(tmp_path):
    mirror, source = Mirror(tmp_path), NumpySource()
    source.step()
    end = Receiver(mirror, "127.0.0.1:0", "the token of a job")
    feed = Feed(source, end.address, "another token", 1)
    assert not reached(feed, 0, 0.5)
    assert isinstance(feed.error, ConnectionError)
    with socket.create_connection(split_address(end.address)) as stranger:
        stranger.sendall(b"x" * 64)
        assert len(stranger.recv(1000)) == 32  # a challenge, and nothing else
        assert stranger.recv(1000) == b""
    assert mirror.manifest is None
    feed.close()
    end.close()
    with socket.create_server(("127.0.0.1", 0)) as false:

        def lure():
            sock = false.accept()[0]
            sock.sendall(bytes(64))
            sock.recv(1000)
            sock.close()

        threading.Thread(target=lure, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not know"):
            Channel.connect(f"127.0.0.1:{false.getsockname()[1]}", "the token of a job")
    with pytest.raises(ValueError, match="can be reached by others"):
        Receiver(mirror, "0.0.0.0:0", "")


def test_a_frame_that_was_changed_or_repeated_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    sender = Channel(ours, b"key", (b"sender", b"receiver"))
    end = Channel(theirs, b"key", (b"receiver", b"sender"))
    sender.send({"end": 3})
    theirs.settimeout(None)
    time.sleep(0.05)
    frame = theirs.recv(1000, socket.MSG_PEEK)
    assert end.receive() == {"end": 3}
    ours.sendall(frame)
    with pytest.raises(ConnectionError, match="repeated"):
        end.receive()
    changed = Channel(theirs, b"key", (b"receiver", b"sender"))
    ours.sendall(frame[:-1] + b"]")
    with pytest.raises(ConnectionError, match="changed"):
        changed.receive()
    ours.close()
    with pytest.raises(ConnectionError, match="ended"):
        end.receive()
    theirs.close()


def test_a_relay_forwards_and_a_later_job_takes_over(tmp_path):
    relay, leaf = Mirror(tmp_path / "relay"), Mirror(tmp_path / "leaf")
    ends = [Receiver(mirror, "127.0.0.1:0", "token") for mirror in (relay, leaf)]
    behind = Feed(relay, ends[1].address, "token", 2)
    for session, last in (("1", 4), ("2", 2)):
        source = NumpySource(session, seed=last)
        source.step()
        feed = Feed(source, ends[0].address, "token", 2)
        for version in range(last):
            assert reached(feed, version)
            limit = time.monotonic() + 10
            while (leaf.session, leaf.version) != (session, version) and time.monotonic() < limit:
                time.sleep(0.005)
            assert holds(tmp_path / "leaf" / "current", source), (session, version, behind.error)
            source.step()
        feed.close()
    behind.close()
    for end in ends:
        end.close()


def test_a_receiver_that_is_killed_continues(tmp_path):
    """The receiver is a process that runs a copy of the folder, as an engine's host does."""
    source = NumpySource()
    source.step()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shutil.copytree(Path(receiver.__file__).parent, tmp_path / "receiver")
    variables = {"ZEROJAX_JOB_TOKEN": "a token", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "receiver", "--listen", address, "--mirror", str(tmp_path / "mirror")]
    feed = Feed(source, address, "a token", 2)
    rng = np.random.default_rng(0)
    for _ in range(3):
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE)
        source.step()
        assert reached(feed, source.version), feed.error
        for _ in range(20):
            source.step()
            time.sleep(rng.random() / 200)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        state = json.loads((tmp_path / "mirror" / "current" / "zerojax.json").read_text())
        assert state["version"] <= source.version
    source.step()
    process = subprocess.Popen(command, env=variables)
    assert reached(feed, source.version), feed.error
    assert holds(tmp_path / "mirror" / "current", source)
    feed.close()
    process.kill()
    process.wait()


def test_a_request_tells_the_engine_its_folder(tmp_path):
    got = []

    class Engine(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: object):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = NumpySource()
        mirror = Mirror(tmp_path, [Post(f"http://127.0.0.1:{server.server_port}/collective_rpc")])
        session, manifest, _ = source.description()
        mirror.begin(session, Manifest(manifest))
        for patch in source.step():
            mirror.apply(session, patch)
        server.shutdown()
    path = str((tmp_path / "current").resolve())
    assert got == [{"method": "reload_weights", "kwargs": {"weights_path": path}}]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--listen", "here"], "'here' is not HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--relay", "there:x"], "'there:x' is not HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "so a token is needed"),
    ],
)
def test_an_address_that_is_none_or_open_to_strangers_is_refused_in_one_line(
    options: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--mirror", str(tmp_path), *options])
    assert line in capsys.readouterr().err.splitlines()[-1]
