#!/usr/bin/env python
"""Mutation tests: break the core in small plausible ways, one at a time, and check that the tests notice.

    scripts/acceptance/mutants.py --check       # do the lists still fit the code? runs no test
    scripts/acceptance/mutants.py --jobs 2      # all; results of an interrupted run are kept
    scripts/acceptance/mutants.py --only prefetch_scan gradient_queue --fresh

Each list in `scripts/acceptance/mutants/` names a source file, the tests that should notice a change of it,
cheapest first (pytest's arguments, one run per line), and the mutants: a text that occurs exactly once in the
file, and its replacement. After a refactoring, `--check` names the texts that no longer fit.

A mutant is applied to a copy of the tree, never to the checkout. The first test that fails, or hangs, kills
it. A mutant that survives all of its tests needs another test, or an explanation why it is `equivalent` to
the original. Exit code: 0 if only equivalent mutants survive, 1 otherwise, 2 if a list does not fit the code
or a test fails without any mutant.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = Path("scripts") / "acceptance" / "mutants"
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "site", "build", "dist")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
MISSPELT = re.compile(r"NameError: name '\w+' is not defined")
ALLOWANCE = (60, 4)
"""(seconds, factor): a test hangs if it takes longer than the seconds plus factor times its usual time."""
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Other signals come from outside and say nothing about a mutant."""

running: set[int] = set()
"""The sessions of running tests."""


class StaleError(Exception):
    """A list does not fit the code."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        name: the list's name and what the change breaks; unique.
        file: the changed file, relative to the root.
        text: of the whole changed file.
        tests: pytest's arguments, one run each, in this order.
        equivalent: why no test can notice the change, or "".
    """

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    equivalent: str

    @property
    def fingerprint(self) -> str:
        """A hash of the changed file: results hold for this text only."""
        return hashlib.sha256(f"{self.file}\n{self.text}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """The result of a mutant.

    Attributes:
        verdict: "killed", "survived" or "equivalent"; "not equivalent" if a test killed it although it is
            marked equivalent; "broken" if it has an undefined name or cannot be imported.
        by: the test that killed it, or why it is equivalent.
        seconds: of all tests.
        fingerprint: of the mutant.
    """

    verdict: str
    by: str
    seconds: float
    fingerprint: str

    @property
    def good(self) -> bool:
        """Whether it needs no further attention."""
        return self.verdict in ("killed", "equivalent")


def read_lists(root: Path) -> list[Mutant]:
    """Every mutant of every list.

    Raises:
        StaleError: a text does not occur exactly once, a change changes nothing or cannot be parsed, or a
            name is given twice; one line for each.
    """
    mutants, wrong = [], []
    for path in sorted((root / LISTS).glob("*.toml")):
        listed = tomllib.loads(path.read_text())
        source = (root / listed["file"]).read_text() if (root / listed["file"]).exists() else ""
        if not source:
            wrong.append(f"{path.name}: {listed['file']} is not there")
            continue
        for given in listed["mutants"]:
            name = f"{path.stem}: {given['breaks']}"
            text = source.replace(given["old"], given["new"])
            if (times := source.count(given["old"])) != 1:
                wrong.append(f"{name}: its text occurs {times} times in {listed['file']}, not once")
            elif text == source:
                wrong.append(f"{name}: changes nothing")
            elif any(name == other.name for other in mutants):
                wrong.append(f"{name}: this name is given twice")
            elif fault := _syntax_error(text):
                wrong.append(f"{name}: {fault}")
            tests = (*given.get("tests", ()), *listed["tests"])
            mutants.append(Mutant(name, listed["file"], text, tests, given.get("equivalent", "")))
    if wrong:
        raise StaleError("\n".join(wrong))
    return mutants


def _syntax_error(text: str) -> str:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    return ""


@contextlib.contextmanager
def copy_of(root: Path) -> Generator[Path]:
    """A temporary copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        yield shutil.copytree(root, Path(folder) / "tree", ignore=LEFT_OUT)


def run_tests(tree: Path, tests: str, compiled: Path, limit: float | None = None) -> tuple[int | None, str]:
    """Run pytest in a tree up to the first failure; returns its exit status (None if it hung) and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    # The tests of all mutants share a cache of compiled programs.
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    with tempfile.TemporaryFile() as written:
        # In a separate session, so that processes started by a test end with it.
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process.pid)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process.pid)
            process.wait()
            running.remove(process.pid)
        written.seek(0)
        return status, written.read().decode(errors="replace")


def end(session: int) -> None:
    """Kill the remaining processes of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def judge(mutant: Mutant, root: Path, compiled: Path, usual: dict[str, float]) -> Result:
    """Run a mutant's tests until one fails.

    Args:
        mutant: to be applied to a copy.
        root: of the tree.
        compiled: folder of compiled programs.
        usual: seconds of each test without a mutant.
    """
    start = time.monotonic()

    def result(verdict: str, by: str) -> Result:
        if mutant.equivalent and verdict == "killed":
            verdict = "not equivalent"
        return Result(verdict, by, round(time.monotonic() - start, 1), mutant.fingerprint)

    with copy_of(root) as tree:
        (tree / mutant.file).write_text(mutant.text)
        for tests in mutant.tests:
            status, output = run_tests(tree, tests, compiled, ALLOWANCE[0] + ALLOWANCE[1] * usual[tests])
            failed = FAILED.search(output)
            if status == 0:
                continue
            if status is None:
                return result("killed", f"{tests} hung")
            if -status in CRASHES:
                return result("killed", f"{tests} crashed by {signal.Signals(-status).name}")
            if status != 1 or failed is None or MISSPELT.search(output):
                return result("broken", f"{tests} ended with {status}: {output.strip().splitlines()[-1]}")
            return result("killed", failed[1])
    return result("equivalent", mutant.equivalent) if mutant.equivalent else result("survived", "")


class Ledger:
    """The results of earlier runs and of this one, written to disk after each mutant."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        """Read earlier results, or start without."""
        self.path = path
        kept = json.loads(path.read_text()) if path.exists() and not fresh else {}
        self.results = {name: Result(**fields) for name, fields in kept.items()}

    def known(self, mutant: Mutant) -> bool:
        """Whether a result is known; survivors are tested again, because tests change."""
        result = self.results.get(mutant.name)
        if result is None or result.fingerprint != mutant.fingerprint:
            return False
        return result.verdict == ("equivalent" if mutant.equivalent else "killed")

    def add(self, name: str, result: Result) -> None:
        """Record a result."""
        self.results[name] = result
        draft = self.path.with_suffix(".draft")
        plain = {key: dataclasses.asdict(result) for key, result in self.results.items()}
        draft.write_text(json.dumps(plain, indent=1))
        draft.replace(self.path)


def each[T, R](jobs: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Apply a function to items, a number of them at a time; yields results as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # whatever it is, do not wait for what is at work
            pool.shutdown(wait=False, cancel_futures=True)
            for session in list(running):
                end(session)
            raise


def run_unchanged(root: Path, tests: list[str], compiled: Path, jobs: int) -> dict[str, float]:
    """Seconds of each test without a mutant.

    Raises:
        StaleError: a test fails, or there is none.
    """
    seconds = {}

    def run(one: str) -> tuple[int | None, str, float]:
        start = time.monotonic()
        return *run_tests(tree, one, compiled), time.monotonic() - start

    with copy_of(root) as tree:
        for one, (status, output, taken) in each(jobs, run, tests):
            if status != 0:
                raise StaleError(f"without any mutant, {one} ends with {status}:\n{output[-2000:]}")
            print(f"{'unchanged':14} {taken:6.1f} s  {one}", flush=True)
            seconds[one] = taken
    return seconds


def run_all(root: Path, chosen: list[Mutant], folder: Path, *, jobs: int, fresh: bool) -> list[Result]:
    """Test every mutant without a known result; returns all results in the order of the lists."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "results.json", fresh=fresh)
    left = [mutant for mutant in chosen if not ledger.known(mutant)]
    compiled = folder / "compiled"
    usual = run_unchanged(root, list(dict.fromkeys(t for m in left for t in m.tests)), compiled, jobs)
    for mutant, result in each(jobs, lambda mutant: judge(mutant, root, compiled, usual), left):
        ledger.add(mutant.name, result)
        print(_line(mutant, result), flush=True)
    return [ledger.results[mutant.name] for mutant in chosen]


def _line(mutant: Mutant, result: Result) -> str:
    by = f"  ({result.by})" if result.by else ""
    return f"{result.verdict:14} {result.seconds:6.1f} s  {mutant.name}{by}"


def main() -> int:
    """Read the lists, run the chosen mutants, print the results; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of the names of mutants to run")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of earlier runs")
    parser.add_argument("--check", action="store_true", help="only check that the lists fit the code")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree (default: this script's)")
    parser.add_argument(
        "--folder", type=Path, help="for results and compiled programs (default: runs/mutants in the root)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    root = options.root.resolve()
    try:
        mutants = read_lists(root)
        chosen = [mutant for mutant in mutants if mutant.name.startswith(tuple(options.only))]
        print(f"{len(mutants)} mutants fit the code, {len(chosen)} are chosen", flush=True)
        if options.check or not chosen:
            return 0 if chosen else 2
        folder = (options.folder or root / "runs" / "mutants").resolve()
        results = run_all(root, chosen, folder, jobs=options.jobs, fresh=options.fresh)
    except StaleError as error:
        print(error, file=sys.stderr)
        return 2
    print()
    for mutant, result in zip(chosen, results, strict=True):
        print(_line(mutant, result))
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
