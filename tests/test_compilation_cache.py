"""zerojax.compilation_cache: compiled programs in a folder, whatever its state, which many processes use."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache
from jax._src import compiler as jax_compiler

from zerojax import compilation_cache
from zerojax.compilation_cache import Folder, apply_setting, describe, use_compilation_cache

backend_compile = jax_compiler.backend_compile_and_load

# Prints how many programs were asked for, and how many of them were found; then a result.
PROGRAM = """
import collections, sys
import jax, jax.numpy as jnp
import zerojax

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rsplit("/")[-1]]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
zerojax.use_compilation_cache(*sys.argv[1:])
total = jax.jit(lambda x: jnp.sum(jnp.sin(x @ x)))(jnp.ones((32, 32)))
print(counts["compile_requests_use_cache"], counts["cache_hits"], float(total))
"""


def program(*arguments: object, no_files: bool = False, **env: str) -> subprocess.Popen[str]:
    """Start the program in a process that shares nothing with this one, and may be unable to write files."""
    limit = "ulimit -f 0; " if no_files else ""
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    return subprocess.Popen(
        ["sh", "-c", limit + 'exec "$@"', "sh", sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(process: subprocess.Popen[str]) -> tuple[int, int, float, list[str]]:
    """Programs asked for and found, the result, and the lines of standard error."""
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    asked, found, total = out.split()
    return int(asked), int(found), float(total), errors.splitlines()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], float]:
    """A folder that two processes have filled at once, the lines that they wrote, and their result."""
    folder = tmp_path_factory.mktemp("shared")
    together = [program(folder, PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    first, second = map(done, together)
    assert first[2] == second[2]
    return folder, [*first[3], *second[3]], first[2]


@pytest.fixture
def settings() -> Iterator[None]:
    """JAX's settings as they are, and again at the end."""
    names = [
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    found: list[str] = []
    monkeypatch.setattr(compilation_cache.logger, "warning", found.append)
    return found


@pytest.mark.usefixtures("settings")
def test_small_programs_are_kept_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    name = "jax_persistent_cache_min_compile_time_secs"
    for setting, kept_from in (("1", 1.0), (None, 0.0)):
        jax.config.update(name, 1.0)
        monkeypatch.delenv(name.upper(), raising=False)
        if setting is not None:
            monkeypatch.setenv(name.upper(), setting)
        use_compilation_cache(tmp_path)
        assert getattr(jax.config, name) == kept_from


@pytest.mark.usefixtures("settings")
def test_a_program_is_loaded_and_never_compiled(tmp_path, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    use_compilation_cache(tmp_path)
    compiled = []
    monkeypatch.setattr(
        jax_compiler, "backend_compile_and_load", lambda *args: compiled.append(1) or backend_compile(*args)
    )

    def made():
        function = jax.jit(lambda x: x * 3.25 + 1)
        return function, function.lower(jax.ShapeDtypeStruct((5,), "float32"))

    assert not compilation_cache.load(made()[1])
    assert not compiled
    made()[1].compile()
    function, lowered = made()
    assert compilation_cache.load(lowered)
    assert function(np.ones(5, np.float32)).tolist() == [4.25] * 5
    assert compiled == [1]
    apply_setting("off")
    assert not compilation_cache.load(made()[1])
    assert compiled == [1]


def test_processes_share_a_folder_and_results_are_the_same(shared):
    folder, said, total = shared
    asked, found, again, more = done(program(folder, PYTHONHASHSEED="3"))
    assert asked == found > 0, "a program was compiled again"
    assert again == total
    assert not [*said, *more]
    assert {path.suffix for path in folder.iterdir()} == {".zerojax"}


def test_a_full_disk_is_one_line(shared, tmp_path):
    *_, total, said = done(program(tmp_path, no_files=True))
    assert said == [f"zerojax: {tmp_path}: compiled programs are not kept: {os.strerror(errno.EFBIG)}"]
    assert not list(tmp_path.iterdir())
    assert total == shared[2]


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    *_, said = done(program(folder))
    assert said == [f"zerojax: {folder}: compiled programs cannot be read: {os.strerror(errno.ENOTDIR)}"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_what_cannot_be_written_is_tried_once(tmp_path, monkeypatch, lines, code):
    folder = Folder(str(tmp_path))
    folder.put("old", b"program")

    def fail(path: Path, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", fail)
    folder.put("new", b"program")
    folder.put("newer", b"program")
    assert lines == [f"{tmp_path}: compiled programs are not kept: {os.strerror(code)}"]
    assert folder.get("old") == b"program"
    assert folder.get("new") is None


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:40] + b"!" + x[41:]])
def test_a_damaged_program_is_one_line_and_is_replaced(tmp_path, lines, damage):
    folder = Folder(str(tmp_path))
    folder.put("key", b"a program of some length")
    (place,) = tmp_path.iterdir()
    place.write_bytes(damage(place.read_bytes()))
    assert folder.get("key") is None
    assert lines == [f"{place} is damaged: compiling again"]
    folder.put("key", b"another")
    assert folder.get("key") == b"another"


def test_what_is_no_program_is_one_line_and_is_replaced(shared, tmp_path):
    full, _, total = shared
    for place in full.iterdir():
        Folder(str(tmp_path)).put(place.stem.rpartition("-")[0], b"what another software keeps")
    asked, found, again, said = done(program(tmp_path))
    assert (found, again) == (0, total)
    assert len(said) == asked
    assert all("cannot be loaded" in line for line in said)
    assert done(program(tmp_path))[1] == asked


def test_programs_of_another_processor_are_not_loaded(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path))
    folder.put("key", b"program")
    monkeypatch.setattr(compilation_cache, "_processor", lambda: "another")
    assert folder.get("key") is None


def test_what_another_process_has_written_stays(tmp_path):
    Folder(str(tmp_path)).put("key", b"first")
    Folder(str(tmp_path)).put("key", b"second")
    assert Folder(str(tmp_path)).get("key") == b"first"


def test_the_least_recently_used_programs_are_removed(tmp_path, settings):
    jax.config.update("jax_compilation_cache_max_size", 3 * 132)
    folder = Folder(str(tmp_path))
    for age, name in enumerate("abc"):
        folder.put(name, bytes(100))
        (place,) = tmp_path.glob(f"{name}-*")
        os.utime(place, (1000 + age, 1000 + age))
    abandoned, fresh = tmp_path / "old.part", tmp_path / "new.part"
    abandoned.touch()
    os.utime(abandoned, (1000, 1000))
    fresh.touch()
    assert folder.get("a") is not None  # used now
    folder.put("d", bytes(100))
    assert [name for name in "abcd" if folder.get(name)] == ["a", "c", "d"]
    assert fresh.exists()
    assert not abandoned.exists()
    folder.put("large", bytes(1000))
    assert folder.get("large") is None


def test_a_size_of_nothing_keeps_nothing(tmp_path, settings):
    jax.config.update("jax_compilation_cache_max_size", 0)
    Folder(str(tmp_path)).put("key", b"program")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {"HOME": "/home/a"}, "/home/a/.cache/zerojax"),
        ("darwin", {"HOME": "/Users/a"}, "/Users/a/Library/Caches/zerojax"),
        ("linux", {"HOME": "/home/a", "XDG_CACHE_HOME": "/fast"}, "/fast/zerojax"),
    ],
)
def test_the_users_folder(monkeypatch, system, variables, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert compilation_cache.user_folder() == Path(expected)


def test_the_default_folder_is_the_users_own(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() == (folder := tmp_path / "zerojax" / "compiled")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_settings_and_variables_choose(tmp_path, settings):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "variable"))
    apply_setting("auto")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "variable")
    apply_setting(str(tmp_path / "setting"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "setting")
    Folder(str(tmp_path / "setting")).put("key", bytes(168))
    assert describe() == f"1 (200 B of at most 4.00 GB) in {tmp_path / 'setting'}"
    apply_setting("off")
    assert use_compilation_cache(tmp_path) is None
    assert describe().startswith("not kept")


def test_a_user_without_a_home_compiles(monkeypatch, settings):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compilation_cache, "user_folder", no_home)
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() is None
    assert describe().startswith("not kept")
