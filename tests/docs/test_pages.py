"""Every command and every piece of code in the documentation, run word for word."""

import doctest
import functools
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from environment import for_programs
from flax import nnx
from forked_programs import ForkedPrograms
from pages import PAGES, REASONS, ROOT, RUN, SHOWN, CodeBlock, blocks

import zerojax
from zerojax.run.config import config_from_dict

BY_PAGE = {str(page.relative_to(ROOT)): blocks(page) for page in PAGES}
CONFIGS = [b for found in BY_PAGE.values() for b in found if b.kind == "toml" and not b.reason]


def to_run(kind: str) -> dict[str, list[CodeBlock]]:
    """Per page, the blocks of a kind that are run; pages without any left out."""
    chosen = {name: [b for b in found if b.kind == kind and not b.reason] for name, found in BY_PAGE.items()}
    return {name: found for name, found in chosen.items() if found}


COMMANDS = to_run("sh")
PROGRAMS = {page: "\n".join(block.code for block in found) for page, found in to_run("python").items()}
FIRST = {code: page for page, code in reversed(PROGRAMS.items())}
"""Two pages may have the same program, which is run once."""
# Each trains, traces or compiles models for ten seconds of CPU time or more.
LONG = (
    "docs/adapters.md",
    "docs/benchmark-notes.md",
    "docs/checkpoints.md",
    "docs/clusters.md",
    "docs/data.md",
    "docs/experts.md",
    "docs/fine-tuning.md",
    "docs/huggingface.md",
    "docs/long-context.md",
    "docs/lora-to-peft.md",
    "docs/monitor.md",
    "docs/optimizers.md",
    "docs/planner.md",
    "docs/settings.md",
    "docs/start.md",
    "docs/two-nodes.md",
    "docs/wire.md",
)
# Each compiles steps or loops of generation for three seconds of CPU time or more. Those of README.md and
# docs/bring-your-model.md, which train as well, always run.
LONG_PROGRAMS = (
    "docs/adapters.md",
    "docs/generation.md",
    "docs/long-context.md",
    "docs/own-loop.md",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout to a command and takes what the commands of a page write."""
    folder = tmp_path
    for name in ("configs", "scripts", "examples", "tests", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def environment(devices: int = 0) -> dict[str, str]:
    """This Python first; devices for a program, where commands emulate what their config asks for."""
    variables = for_programs()
    if devices:
        variables["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    path = f"{Path(sys.executable).parent}:{variables['PATH']}"
    return variables | {"PATH": path, "PYTHONWARNINGS": "default"}


EXAMPLES = (
    *("Stack", "ZeroConfig", "make_mesh", "LoRA", "TrainState.create", "train_step", "eval_step"),
    *("predict_step", "Replicated", "with_replica", "weight_sum", "comm_report", "gather_params"),
    *("put_params", "gather_model", "chain", "average_weights", "Trainer", "own_tokens", "attention"),
    *("whole_rows", "tiled"),
)


def run(command: list[str], block: CodeBlock, checkout: Path) -> None:
    done = subprocess.run(
        command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{block}:\n{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    """What runs the pages' programs, on eight emulated devices."""
    forked = ForkedPrograms(environment(devices=8))
    yield forked
    forked.close()


def pages(names: Iterable[str], slow: Container[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.mark.parametrize("page", pages(COMMANDS, LONG))
def test_the_commands_of_a_page_work_in_their_order(page: str, checkout: Path):
    for block in COMMANDS[page]:
        run(["bash", "-euo", "pipefail", "-c", block.code], block, checkout)


@pytest.mark.parametrize("page", pages(FIRST.values(), LONG_PROGRAMS))
def test_the_python_of_a_page_runs_as_one_program(page: str, checkout: Path, programs: ForkedPrograms):
    output = checkout / "output.txt"
    code = programs.run(PROGRAMS[page], checkout, output)
    assert code == 0, f"{page}:\n{output.read_text()[-6000:]}"


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_the_settings_shown_are_settings(block: CodeBlock):
    config_from_dict(tomllib.loads(block.code), origin=str(block))


@pytest.mark.parametrize("page", BY_PAGE)
def test_what_is_not_run_says_why(page: str):
    for block in BY_PAGE[page]:
        assert block.kind in (*RUN, *SHOWN), f"{block}: a fence of {block.kind!r} is neither run nor output"
        assert block.reason is None or block.reason in REASONS, f"{block}: not run: {block.reason!r}"


def test_the_blocks_are_found():
    start = BY_PAGE["docs/start.md"]
    assert [b.kind for b in start] == ["sh", "text", "sh", "sh", "sh", "sh", "python"]
    assert start[0].reason == "sets up a machine"
    assert "zerojax sample" in start[5].code


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.*")), ids=lambda path: path.name)
def test_a_script_that_names_its_interpreter_can_be_started(script: Path):
    assert script.read_bytes().startswith(b"#!") == bool(script.stat().st_mode & 0o100)


def test_what_a_function_returns_is_one_row_of_the_api_page():
    griffe = pytest.importorskip("griffe", reason="the extra zerojax[docs] is not installed")
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    [options] = [plugin["mkdocstrings"] for plugin in settings["plugins"] if "mkdocstrings" in plugin]
    options = options["handlers"]["python"]["options"]["docstring_options"]
    assert options == {"returns_multiple_items": "false"}
    text = "Sum.\n\nReturns:\n    The first line of a text: it has a colon,\n    and a second line.\n"
    sections = griffe.Docstring(text).parse("google", returns_multiple_items=False)
    [row] = sections[1].value
    assert row.description == "The first line of a text: it has a colon,\nand a second line."


def test_the_examples_of_the_public_names_run():
    """In one session, in the order of what they build on."""
    shared = {
        "zerojax": zerojax,
        "jax": jax,
        "itertools": itertools,
        "jnp": jnp,
        "np": np,
        "nnx": nnx,
        "optax": optax,
    }
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in EXAMPLES:
        [test] = finder.find(functools.reduce(getattr, name.split("."), zerojax), name, globs={})
        assert test.examples, f"{name} has no example"
        test.globs = shared
        assert not runner.run(test, clear_globs=False).failed, name


@pytest.mark.parametrize("of", ["batch", "weight", "gradient"])
def test_a_path_through_the_code_has_six_links_at_most_and_they_lead_to_what_they_name(of: str):
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"### The path of a {of}\n")[1].split("\n#")[0]
    links = re.findall(r"\[`([\w.]+)`\]\(([\w/.]+)\)", text)
    assert 0 < len(links) == text.count("](") <= 6
    for name, file in links:
        code = (ROOT / file).read_text()
        assert all(re.search(rf"\b(def|class) {part}\b", code) for part in name.split(".")), (name, file)
