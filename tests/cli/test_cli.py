"""The command line: help, errors, exit codes, and whole runs in separate processes."""

import gc
import importlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import time
import tomllib
from pathlib import Path
from typing import cast

import jax
import pytest
from environment import ROOT, for_programs
from micro_run import micro_config

from zerojax import cli
from zerojax.cli import COMMANDS, main
from zerojax.cli.cluster import emulate_devices
from zerojax.cli.on_config import Options, parse
from zerojax.errors import ZeroError
from zerojax.run.config import MeshSection, RunConfig, dump_config
from zerojax.run.config.keys import keys_of, section_of
from zerojax.run.run_dir import RunFolder
from zerojax.versions import VERSION


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "micro.toml"
    mesh = {"emulate": True}
    path.write_text(dump_config(micro_config(text, mesh=mesh)))
    return path


def test_train_resumes_where_it_stopped(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", str(config), "--run-dir", str(folder)]
    assert main([*arguments, "--train.eval-every", "2"]) == 0
    out = capfd.readouterr().out
    assert "zero3 on 2 x 4 cpu devices" in out
    assert "step 8/8 | loss" in out
    assert RunFolder(folder).read_summary()["devices"] == jax.device_count()
    assert main([*arguments, "--train.steps", "9", "--resume", "must"]) == 0
    again = capfd.readouterr().out
    assert "resuming from step 8; train.eval_every: 2 -> 4; train.steps: 8 -> 9; the" in again
    assert "the learning rate follows the schedule of 9 steps: " in again
    assert "step 9/9 | loss" in again
    assert main([*arguments, "--resume", "never"]) == 2
    refused = capfd.readouterr().err
    assert "holds a run at step 9" in refused
    assert "Traceback" not in refused


def test_a_command_that_does_not_exist_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "zerojax: no command 'trian'; did you mean train?\n"
    assert main(["xyzzy"]) == 2
    assert "usage: zerojax COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--zero.preset", "('zero3', 'zero++', 'zero++-paper', 'delta', 'local')"),
        ("--zero.host", "('optimizer', 'weights', 'activations')"),
        ("--zero.remat", "('full', 'attention', 'none')"),
        ("--resume", "('auto', 'must', 'never')"),
    ],
)
def test_choices_are_listed_in_their_order(
    option: str, choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "gpt-tiny", option, "xyzzy"])
    assert end.value.code == 2
    assert f"Expected one of {choices}" in " ".join(re.findall(r"[^\s│]+", capsys.readouterr().err))


def test_the_help_of_import_says_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: zerojax import [-h] [OPTIONS] MODEL RUN [CONFIG]\n")
    assert [text.count(hint) for hint in ("(required)", "(optional)", "None}", "default: None")] == [
        2,
        1,
        0,
        0,
    ]
    assert "--zero.preset {zero3,zero++,zero++-paper,delta,local}" in text


@pytest.mark.slow
def test_eval_on_one_device_gives_the_loss_of_eight(
    finished: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(finished.path), "--mesh.nodes", "1", "--mesh.local", "1"]) == 0
    loss = float(capfd.readouterr().out.split("validation loss ")[1].split()[0])
    assert loss == pytest.approx(finished.read_summary()["validation_loss"], rel=1e-6)


def test_a_mesh_that_the_batch_does_not_divide_on_is_refused_before_anything_is_written(
    finished: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh, out = ["--mesh.nodes", "3", "--mesh.local", "2"], tmp_path / "out"
    for command in (["eval"], ["export", str(out), "--weights", "int8"]):
        assert main([command[0], str(finished.path), *command[1:], *mesh]) == 2
        wanted = "8 does not divide into 6 devices x train.accumulate 1: change mesh.nodes and mesh.local"
        assert wanted in capfd.readouterr().err
    assert not out.exists()


def test_a_seed_gives_the_same_sample(finished: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in (["--temperature", "0"], ["--temperature", "0"], ["--seed", "1", "--top-k", "50"]):
        code = main(["sample", str(finished.path), "--prompt", "all work", "--tokens", "20", *options])
        assert code == 0
        texts.append(capfd.readouterr().out)
    assert texts[0].startswith("all work")
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_prompt_may_be_any_bytes(finished: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    """A shell passes bytes that are not UTF-8, and Python reads them as halves of surrogate pairs."""
    assert main(["sample", str(finished.path), "--prompt", "all \udcff", "--tokens", "1"]) == 0
    assert capfd.readouterr().out.startswith("all \ufffd")


def test_doctor_describes_the_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--mesh.nodes", "3"]) == 0
    out = capfd.readouterr().out
    for part in (
        "jax ",
        "devices",
        "4 devices per node",
        "kernels",
        "memory",
        "fp8 matmuls",
        "packed documents",
    ):
        assert part in out
    assert main(["doctor", "--mesh.nodes", "99", "--run-dir", f"{__file__}/runs"]) == 0
    out = capfd.readouterr().out
    assert "refused" in out
    assert f"runs cannot be written to ({__file__}: Not a directory)" in out


def test_help_describes_every_option(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(Options, "train", ["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for top in keys_of(RunConfig):
        for key in keys_of(cast(type, section_of(top.kind))):
            option = f"--{top.name}.{key.name.replace('_', '-')}"
            in_file = option in ("--data.mixture", "--posttrain.rewards")
            assert (option in text) != in_file, "a list of tables needs a file"
            assert key.meaning, f"{top.name}.{key.name}"
    with pytest.raises(SystemExit):
        parse(Options, "train", [str(config), "--help"])
    assert "(default: 4)" in capsys.readouterr().out  # the config's own


def test_options_override_the_file(config: Path) -> None:
    _, settings = parse(
        Options, "train", [str(config), "--optimizer.learning-rate", "0.5", "--train.batch_size", "24"]
    )
    assert settings.optimizer.learning_rate == 0.5
    assert settings.train.batch_size == 24
    assert settings.train.steps == 8
    fp8 = ["--zero.matmul-dtype", "fp8", "--zero.fp8", "*", "!*attention*"]
    _, settings = parse(Options, "train", [str(config), *fp8])
    assert settings.zero.fp8 == ("*", "!*attention*")


def test_an_empty_path_is_not_the_current_folder(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell makes of a variable that is not set."""
    for command, words in (("train", [str(config), "--run-dir", ""]), ("sample", [""])):
        with pytest.raises(SystemExit) as exit_:
            main([command, *words])
        assert exit_.value.code == 2
        assert "a path is empty: name a file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("false", False), ("True", True), ("None", True)]
)
def test_a_boolean_is_spelled_as_in_toml(config: Path, word: str, value: bool) -> None:
    """None is the preset's."""
    words = [str(config), "--zero.preset", "zero++", "--zero.hpz", word]
    assert parse(Options, "train", words)[1].zero.hpz is value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: zerojax COMMAND"),
        (["trian"], "no command 'trian'"),
        (["train"], "name a config first"),
        (["train", "--train.steps", "5"], "name a config first"),
        (["train", "gpt-tinny"], "did you mean gpt-tiny?"),
        (["train", "missing.toml"], "missing.toml: no such file"),
        (["train", "/usr"], "/usr: a folder, not a file"),
        (["train", "CONFIG", "--train.stepps", "5"], "--train.steps"),
        (["train", "CONFIG", "--train.steps", "many"], "invalid literal"),
        (["train", "CONFIG", "--train.steps", "0"], "train.steps = 0 must be at least 1"),
        (["train", "CONFIG", "--train.accumulate", "3"], "8 does not divide into"),
        (["train", "CONFIG", "--zero.preset", "zero9"], "invalid choice 'zero9'"),
        (["train", "CONFIG", "--zero.stage", "7"], "invalid choice '7' for argument '--zero.stage'"),
        (["train", "CONFIG", "--zero.hpz", "maybe"], "--zero.hpz"),
        (["train", "CONFIG", "--data.source", "nowhere"], "no such file, folder or glob"),
        (["train", "CONFIG", "--coordinator", "host:1"], "no process_id given"),
        (["sample", "nowhere"], "nowhere is not a run folder"),
        (["eval", "nowhere"], "nowhere is not a run folder"),
        (["eval", "n" * 300], "n/config.toml: File name too long"),
        (["report", "RUN"], "RUN/metrics.jsonl: Is a directory"),
        (["train", "CONFIG", "--run-dir", "lost"], "lost is a link to nothing"),
        (["overlap", "RUN/config.toml"], "RUN/config.toml: it has no event of a device"),
    ],
)
def test_wrong_use_is_reported_in_one_line(
    arguments: list[str],
    message: str,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RUN", "metrics.jsonl").mkdir(parents=True)
    Path("RUN", "config.toml").touch()
    Path("lost").symlink_to("nowhere")
    given = [str(config) if word == "CONFIG" else word for word in arguments]
    try:
        code = main(given)
    except SystemExit as exit_:
        code = exit_.code
    seen = "".join(capfd.readouterr())
    assert code == 2
    assert message in " ".join(seen.split())
    assert "Traceback" not in seen


def test_an_interrupt_that_the_garbage_collector_ignores_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        gc.callbacks.remove(interrupt)
        raise KeyboardInterrupt

    def collect() -> None:
        gc.callbacks.append(interrupt)
        gc.collect()
        time.sleep(10)

    monkeypatch.setattr(sys, "unraisablehook", cli._repeat_interrupt)
    with pytest.raises(KeyboardInterrupt):
        collect()


def test_a_line_is_written_at_once() -> None:
    reader, writer = os.pipe2(os.O_DIRECT)  # what is written at once is read at once, and no more
    command = [sys.executable, "-u", "-m", "zerojax", "--version"]
    with open(reader, "rb", buffering=0) as pipe, open(writer, "wb") as target:
        subprocess.run(command, check=True, env=for_programs(), stdout=target)
        assert pipe.read(1000) == f"zerojax {VERSION}\n".encode()


@pytest.mark.parametrize("command", ["--help", "schema"])
def test_output_that_cannot_be_written_is_reported_in_one_line(command: str) -> None:
    program = [sys.executable, "-m", "zerojax", command]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(program, env=for_programs(), stdout=full, stderr=subprocess.PIPE, text=True)
    written = "zerojax: cannot write to standard output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, written)
    closed = subprocess.run(["sh", "-c", '"$@" >&-', *program[:1], *program], env=for_programs(), stderr=-1)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_debugging_options_of_jax_are_ignored(config: Path) -> None:
    """With each of them a model of zerojax, or optax, would fail when it is traced."""
    env = for_programs() | {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    env |= {
        "JAX_DISABLE_JIT": "1",
        "JAX_NO_TRACING": "1",
        "JAX_SCAN3": "1",
        "JAX_ERROR_CHECKING_BEHAVIOR_NAN": "raise",
        "JAX_TRANSFER_GUARD": "disallow",
    }
    program = [sys.executable, "-m", "zerojax", "comm", str(config), "--json"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    ignored = [line.split()[1] for line in done.stderr.splitlines() if "is ignored" in line]
    assert sorted(ignored) == sorted(name for name in env if name.startswith(cli._DEBUGGING))


@pytest.mark.parametrize(
    ("variable", "code", "message"),
    [
        ("JAX_PLATFORMS", 1, "zerojax: JAX has no device of JAX_PLATFORMS=nothing: "),
        (
            "JAX_ENABLE_X64",
            2,
            "zerojax: JAX refuses an option: invalid truth value 'nothing' for environment",
        ),
    ],
)
def test_a_wrong_option_of_jax_is_reported_in_one_line(variable: str, code: int, message: str) -> None:
    program = [sys.executable, "-m", "zerojax", "doctor"]
    ended = subprocess.run(program, env=for_programs() | {variable: "nothing"}, stderr=-1, text=True)
    assert ended.returncode == code
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\ufffd é"), ("ascii", "? ??")])
def test_what_an_encoding_lacks_is_replaced(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    for name, raw in (("stdin", io.BytesIO(b"\xff \xc3\xa9")), ("stdout", written), ("stderr", io.BytesIO())):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding))
    monkeypatch.setattr(cli, "_main", lambda _: print(end=sys.stdin.read(), flush=True))
    monkeypatch.setattr(cli, "is_stuck", lambda: False)  # a test before may have left a stuck thread
    cli.main()
    assert written.getvalue().decode(encoding) == shown


def test_a_thread_in_jaxlib_does_not_change_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        textwrap.dedent("""
            import threading
            import jax
            from zerojax import cli

            def compute():
                while True:
                    jax.block_until_ready(jax.device_put(0))

            def command(given):
                for _ in range(4):
                    threading.Thread(target=compute, daemon=True).start()
                print(end="done")
                return 3

            cli._main = command
            cli.program()
        """)
    )
    ended = subprocess.run(
        [sys.executable, script], env=for_programs(), capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done", "")


def test_the_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("zerojax 0.")
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)


def test_launchers_start_without_jax() -> None:
    """Importing JAX and Flax takes most of a second of CPU time."""
    program = "import sys, zerojax.cli.launch, zerojax.cli.emulate; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there_and_no_other() -> None:
    package = importlib.import_module("zerojax")
    assert {"TrainState", "Trainer", "checkpoints", "cluster", "posttrain"} <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="module 'zerojax' has no attribute 'TrainStat'"):
        _ = package.TrainStat


@pytest.mark.slow
def test_a_source_tree_without_installation(config: Path, tmp_path: Path) -> None:
    """Without metadata of zerojax: ``python -S`` sees all other packages of this environment."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for file in Path(sysconfig.get_path("purelib")).iterdir():
        if "zerojax" not in file.name:
            (packages / file.name).symlink_to(file)
    environment = for_programs() | {"PYTHONPATH": f"{ROOT}:{packages}"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
        )

    assert (
        "PackageNotFoundError"
        in run("-c", "from importlib.metadata import version; version('zerojax')").stderr
    )
    assert run("-m", "zerojax", "--version").stdout == f"zerojax {VERSION}\n"
    folder = tmp_path / "run"
    done = run("-m", "zerojax", "train", config, "--run-dir", folder, "--train.steps", 1)
    assert done.returncode == 0, done.stderr
    assert RunFolder(folder).read_summary()["versions"]["zerojax"] == VERSION
    assert run("-m", "zerojax", "report", folder).returncode == 0


def test_the_version_of_an_installation_is_that_of_the_source() -> None:
    root = ROOT
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    [found] = re.findall(
        r'^VERSION = "(.*)"$', (root / project["tool"]["hatch"]["version"]["path"]).read_text(), re.M
    )
    assert found == VERSION


def test_an_unknown_key_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[train]\nstesp = 5\n")
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "run.toml: unknown key train.stesp (did you mean train.steps?)" in capsys.readouterr().err


class TestEmulateDevices:
    def test_an_existing_flag_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=5")
        emulate_devices(MeshSection(nodes=2, local=4, emulate=True))
        assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=5"

    def test_devices_are_divided_among_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
        emulate_devices(MeshSection(nodes=2, local=4, emulate=True))
        assert "--xla_dump_to= --xla_force_host_platform_device_count=8" in os.environ["XLA_FLAGS"]
        monkeypatch.delenv("XLA_FLAGS")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
        with pytest.raises(ZeroError, match="do not divide among 3 processes"):
            emulate_devices(MeshSection(nodes=2, local=4, emulate=True))


def test_a_working_directory_that_is_gone_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["train", "gpt-tiny", "--dry-run"]) == 2
    assert "the working directory is gone, change to another: No such file" in capsys.readouterr().err
