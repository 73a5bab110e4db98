"""Tensors on a device follow a job exactly, and change only when a version is complete. Needs PyTorch."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from patch_encoder import encode

from zerojax.interop.engines.receiver.manifest import Manifest
from zerojax.interop.engines.receiver.patches import Patch, PatchError, full

torch = pytest.importorskip("torch")
ROWS, COLUMNS, LEFT, CUT = 40, 24, 10, 500
FLAT = ROWS * COLUMNS
MATRICES = [
    [COLUMNS, [[0, 0, ROWS, 0, LEFT, 0, 1, ROWS], [1, 0, ROWS, LEFT, COLUMNS, 0, COLUMNS - LEFT, 1]]],
    [COLUMNS, [[2, 0, ROWS, 0, COLUMNS, 0, COLUMNS, 1]]],
]
MANIFEST = {
    "files": {},
    "tensors": [
        *[["a", "BF16", [LEFT, ROWS]], ["b", "BF16", [ROWS, COLUMNS - LEFT]], ["c", "F32", [ROWS, COLUMNS]]]
    ],
    "matrices": MATRICES,
    "pieces": [[0, 512, [[0, 0, CUT]]], [0, 512, [[0, CUT, FLAT]]], [1, 1024, [[0, 0, FLAT]]]],
}


class Job:
    """A job with a matrix of 16-bit elements and one of 32, and an engine's tensors."""

    def __init__(self, device: str) -> None:
        from zerojax.interop.engines.receiver.on_device import DeviceReplica

        self.rng, self.version, self.pauses = np.random.default_rng(0), 0, 0
        self.small = self.rng.integers(0, 1 << 16, (ROWS, COLUMNS)).astype(np.uint16)
        self.large = self.rng.integers(0, 1 << 32, (ROWS, COLUMNS)).astype(np.uint32)
        self.tensors = {
            # Parts of larger tensors, as the joined weights of an engine.
            "a": torch.zeros(LEFT + 3, ROWS, dtype=torch.bfloat16, device=device)[2:-1],
            "b": torch.zeros(ROWS + 1, COLUMNS - LEFT, dtype=torch.bfloat16, device=device)[1:],
            "c": torch.zeros(ROWS, COLUMNS, device=device),
        }
        self.engine = DeviceReplica(lambda _: self.tensors, self.paused)
        self.engine.begin("1", Manifest(json.dumps(MANIFEST).encode()))
        for number, piece in enumerate(self.pieces()):
            self.engine.apply("1", full(piece, number, 0))

    @contextmanager
    def paused(self, version: int) -> Generator[None]:
        self.pauses += 1
        assert version > self.engine.version
        yield

    def pieces(self) -> list[np.ndarray]:
        flat, padding = self.small.reshape(-1), np.zeros(512, np.uint16)
        parts = [np.append(x, padding)[:512] for x in (flat[:CUT], flat[CUT:])]
        return [*parts, np.append(self.large.reshape(-1), np.zeros(64, np.uint32))]

    def step(self, share: float, largest: int = 1) -> list[Patch]:
        """Change a share of the elements by up to ``largest``, or some by any amount."""
        before = self.pieces()
        for name in ("small", "large"):
            x = getattr(self, name)
            steps = self.rng.integers(1, largest + 1, x.shape) * (self.rng.random(x.shape) < share)
            steps[self.rng.random(x.shape) < share / 20] += 12345
            setattr(self, name, x + steps.astype(x.dtype))
        self.version += 1
        pairs = zip(before, self.pieces(), strict=True)
        return [encode(x, y, i, self.version - 1, self.version) for i, (x, y) in enumerate(pairs)]

    def holds(self, small: np.ndarray, large: np.ndarray) -> bool:
        expected = {"a": small[:, :LEFT].T, "b": small[:, LEFT:], "c": large}
        found = {name: x.cpu().view(torch.uint8).numpy().tobytes() for name, x in self.tensors.items()}
        return found == {name: np.ascontiguousarray(x).tobytes() for name, x in expected.items()}


@pytest.fixture(params=["cpu", "cuda"])
def job(request: pytest.FixtureRequest) -> Job:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU for PyTorch")
    return Job(request.param)


def test_tensors_follow_exactly_and_change_during_a_pause(job: Job) -> None:
    assert job.holds(job.small, job.large)
    seen = list[Patch]()
    for share, largest in ((0.1, 1), (0.01, 1), (0.0, 1), (0.3, 9), (1.0, 2), (1.0, 1 << 15), (0.001, 1)):
        before = job.small, job.large
        patches = job.step(share, largest)
        for patch in patches:
            assert job.holds(*before)
            job.engine.apply("1", patch)
        assert job.engine.version == job.version
        assert job.holds(job.small, job.large)
        seen += patches
    assert job.pauses == 1 + 7
    assert any(patch.escaped for patch in seen)
    assert any(patch.before == -1 for patch in seen), "a full patch"


def test_a_piece_that_is_two_versions_ahead_waits_for_the_others(job: Job) -> None:
    before = job.small, job.large
    one, two = job.step(0.1), job.step(0.1)
    for patch in (one[0], two[0], one[1], one[2], two[1]):
        job.engine.apply("1", patch)
        assert job.holds(*before)
    job.engine.apply("1", two[2])
    assert job.engine.version == 2
    assert job.holds(job.small, job.large)


def test_a_patch_with_other_checksums_changes_nothing(job: Job) -> None:
    before = job.small, job.large
    patches = job.step(0.1)
    job.engine.apply("1", patches[0])
    job.engine.apply("1", replace(patches[1], sums=(1, 2)))
    with pytest.raises(PatchError, match=r"pieces \[1\] would not have"):
        job.engine.apply("1", patches[2])
    assert job.holds(*before)
    assert job.engine.versions([0, 1]) == [1, -1]
    job.engine.apply("1", full(job.pieces()[1], 1, 1))
    assert job.engine.version == 1
    assert job.holds(job.small, job.large)


@pytest.mark.parametrize(
    "change", [{"count": 3}, {"low": 60}, {"bits": 0}, {"body": b"1234"}, {"escaped": 40}]
)
def test_a_damaged_patch_is_refused(job: Job, change: dict) -> None:
    before = job.small, job.large
    patches = job.step(0.1)
    for patch in patches[1:]:
        job.engine.apply("1", patch)
    with pytest.raises(PatchError):
        job.engine.apply("1", replace(patches[0], **change))
    assert job.holds(*before)
