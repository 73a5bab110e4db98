"""``zerojax follow`` keeps a receiver at a run's newest checkpoint."""

import pytest
from environment import zerojax

from zerojax.cli import main
from zerojax.interop.engines.receiver.ends import TOKEN, Receiver
from zerojax.interop.engines.receiver.mirror import Mirror


def test_a_receiver_gets_the_weights_of_a_run(gpt2_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(TOKEN, "a token of sixteen")
    mirror = Mirror(tmp_path / "mirror")
    end = Receiver(mirror, "127.0.0.1:0", "a token of sixteen")
    assert main(["follow", str(gpt2_run.path), "--to", end.address, "--dtype", "fp32"]) == 0
    assert f"at step {mirror.version} of {gpt2_run.path}" in capsys.readouterr().out
    assert main(["export", str(gpt2_run.path), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    for file in ("config.json", "model.safetensors"):
        current = tmp_path / "mirror" / "current" / file
        assert current.read_bytes() == (tmp_path / "out" / file).read_bytes()
    end.close()


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_process_of_a_job_sends_its_shards(processes, gpt2_run, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "a token of sixteen")
    sessions = set()

    class Watched(Mirror):
        def begin(self, session, manifest):
            super().begin(session, manifest)
            sessions.add(session)

        def versions(self, pieces):
            shares.append(set(pieces))
            return super().versions(pieces)

    shares, mirror = [], Watched(tmp_path / "mirror")
    end = Receiver(mirror, "127.0.0.1:0", "a token of sixteen")
    launch = ("launch", "--nodes", processes, "--devices-per-node", 1, "--platform", "cpu")
    follow = ("follow", gpt2_run.path, "--to", end.address, "--flows", 1, "--dtype", "fp32")
    done = zerojax(*launch, *follow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(sessions) == 1
    assert len(shares) == processes
    assert mirror.manifest is not None
    assert sorted(x for share in shares for x in share) == [*range(len(mirror.manifest.pieces))]
    assert main(["export", str(gpt2_run.path), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    current = tmp_path / "mirror" / "current" / "model.safetensors"
    assert current.read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    end.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "host"], "HOST:PORT"),
        (["--to", "h:1", "--dtype", "int8"], "--dtype"),
        (["--to", "h:1", "--block-size", "64"], "add --weights"),
        (["--to", "h:1", "--weights", "fp8-blocks", "--block-size", "0"], "at least one row"),
    ],
)
def test_addresses_and_dtypes_are_checked(gpt2_run, arguments, message, capsys):
    assert main(["follow", str(gpt2_run.path), *arguments]) == 2
    assert message in capsys.readouterr().err
