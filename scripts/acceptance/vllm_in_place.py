#!/usr/bin/env python
"""Change the weights of a real vLLM in place, by its weight transfer, and compare every version.

    scripts/acceptance/vllm_in_place.py --environment ~/vllm --work /tmp/in-place --updates 60 --kills 2

trains a tiny model with a checkpoint after each step, and sends each checkpoint to a worker of vLLM on this
machine's CPU. After each update the SHA-256 of every tensor in vLLM's memory has to equal the export of that
step, and greedy completions have to equal zerojax's. Requests run beside the updates. Between updates the
script kills vLLM, or starts a new job. At the end it tries a stranger and a version that never arrives. The
environment is made as by vllm_mirror.py. Exit code 0 if all are equal.
"""

import argparse
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm_mirror import (
    DTYPES,
    FAMILIES,
    FLAGS,
    GREEDY,
    PORT,
    PROMPTS,
    RECEIVER,
    ROOM,
    ROOT,
    SIZES,
    TOKENS,
    VARIABLES,
    VOCABULARY,
    ZEROJAX,
    Killable,
    call,
    fresh,
    in_vllm,
    make_parser,
    make_place,
    tensors,
)

from zerojax.cli.cluster import emulate_devices
from zerojax.compilation_cache import use_compilation_cache
from zerojax.interop.engines.publisher import Publisher
from zerojax.posttrain.engines.client import Engine, Request
from zerojax.posttrain.engines.weights import Weights
from zerojax.run.config import MeshSection

SERVER = f"http://127.0.0.1:{PORT}"
SECONDS = 900.0  # the first patches compile their encoders


def train(work: Path, updates: int, model: list[str]) -> None:
    """Train on, with a checkpoint after each step."""
    command = ["train", "arithmetic", "--run-dir", "run", "--init-from", "sums"]
    command += ["--data.source", "sums.jsonl"]
    command += ["--data.tokenizer", "sums/data/tokenizer.json", "--model.heads", "2", *model]
    command += ["--train.steps", str(updates), "--train.eval-every", "0", "--train.eval-exact-match", "0"]
    command += ["--checkpoint.every", "1", "--checkpoint.keep", str(updates + 1)]
    subprocess.run([*ZEROJAX, *command], cwd=work, check=True, stdout=subprocess.DEVNULL)


def vllm(python: Path, work: Path, dtype: str) -> Killable:
    """vLLM with the backend. It does not listen yet."""
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", work / "hf"]
    server += ["--max-model-len", ROOM, "--host", "127.0.0.1", "--port", PORT, "--dtype", dtype, *FLAGS]
    server += ["--worker-extension-cls", "receiver.in_vllm.Extension"]
    server += ["--weight-transfer-config", json.dumps({"backend": "zerojax"})]
    return Killable(["env", f"PYTHONPATH={ROOT / 'zerojax/interop/engines'}", *server], work, "vLLM.log")


def listen() -> None:
    """Wait until vLLM responds, and let its worker listen."""
    until(lambda: call("/health", None)[0] == 200)
    status, text = call("/init_weight_transfer_engine", {"init_info": {"listen": RECEIVER, "server": SERVER}})
    assert status == 200, text


def until(found: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        with suppress(OSError):
            if found():
                return
        time.sleep(0.2)
    raise SystemExit(f"nothing happened for {SECONDS} s")


def in_memory() -> dict[str, str]:
    """SHA-256 of each tensor in vLLM's memory."""
    status, text = call("/weight_checker", {"action": "checksum"})
    assert status == 200, text
    return {name.rpartition(":")[2]: x for name, x in json.loads(text)["checksums"].items()}


def completions(version: int) -> list[list[int]]:
    """Greedy completions, which this version of the weights must have made."""
    engine, weights = Engine(SERVER, SECONDS, VOCABULARY), Weights(version, str(version), Path())
    return [engine.complete(Request(prompt, TOKENS, 0), GREEDY, [], weights).tokens for prompt in PROMPTS]


class Traffic:
    """Requests beside the updates. A completion by two versions counts as mixed."""

    def __init__(self) -> None:
        self.done = self.mixed = 0
        self.stopped = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
        while not self.stopped:
            with suppress(OSError, ValueError, KeyError, LookupError):
                spans = json.loads(call("/inference/v1/generate", body)[1])["choices"][0]["weight_versions"]
                self.done += 1
                self.mixed += len({span["version"] for span in spans}) > 1
            time.sleep(0.2)


def main() -> int:
    """Run it; see the module."""
    options = make_parser(__doc__, updates=60, kills=2).parse_args()
    python, work = make_place(options)
    train(work, options.updates, [*FAMILIES[options.family], *SIZES[options.weights]])
    emulate_devices(MeshSection(nodes=1, local=2, emulate=True))
    use_compilation_cache()
    engine = vllm(python, work, DTYPES[options.weights])
    try:
        return follow(python, work, engine, options)
    finally:
        engine.kill()


def follow(python: Path, work: Path, engine: Killable, options: argparse.Namespace) -> int:
    """Send every checkpoint, and compare; 0 if all are equal."""
    from zerojax import generate
    from zerojax.interop.huggingface import FP8Blocks
    from zerojax.interop.huggingface.exporting import export_model, plan_export
    from zerojax.run.build import RunSetup
    from zerojax.run.checkpoints import find, restore_weights
    from zerojax.run.run_dir import RunFolder

    folder = RunFolder(work / "run")
    config = folder.read_config()
    config = replace(config, data=replace(config.data, tokenizer=str(work / "sums/data/tokenizer.json")))
    state, token = RunSetup(config).initial_state(), VARIABLES["ZEROJAX_JOB_TOKEN"]
    updates, kills, dtype = options.updates, options.kills, DTYPES[options.weights]
    how = FP8Blocks((128, 128)) if options.weights == "fp8-blocks" else None
    exports, completed = list[Path](), list[list[list[int]]]()

    def job(secret: str = token) -> Publisher:
        return Publisher(state, config, folder, [RECEIVER], token=secret, dtype=dtype, how=how)

    listen()
    sender, traffic, wrong, compared, seconds = job(), Traffic(), 0, 0, list[float]()
    at = {updates * (i + 1) // (kills + 1): i % 2 for i in range(kills)}
    for step in range(1, updates + 1):
        state = restore_weights(find(folder.checkpoints / str(step)), state)
        start = time.monotonic()
        sender.publish(state, step)
        if not sender.wait(step, SECONDS):
            raise SystemExit(f"step {step}: {sender.errors}")
        seconds.append(time.monotonic() - start)
        exports.append(out := work / "expected" / str(step))
        export_model(state, config, folder, plan_export(state, config, folder, dtype), out, how)
        own = generate(state, [np.asarray(p, np.int32) for p in PROMPTS], TOKENS, temperature=0.0)
        until(lambda: json.loads(call("/is_paused", None)[1]) == {"is_paused": False})
        memory, wanted = in_memory(), in_vllm(tensors(out))
        bad = [name for name, x in wanted.items() if memory.get(name) != x]
        compared += len(wanted)
        completed.append(completions(step))
        same = how is not None or own.tokens.tolist() == completed[-1]
        if bad or not same:
            wrong += 1
            print(f"step {step}: {bad or 'no'} tensors differ, tokens equal: {same}", flush=True)
        if at.get(step) == 0:
            print(f"killing vLLM after step {step}", flush=True)
            engine.kill()
            engine.start()
            listen()
        elif step in at:
            print(f"a new job after step {step}", flush=True)
            sender.close()
            sender = job()
    if how is not None:  # zerojax does not compute as vLLM does with fp8
        new = [tokens for _, tokens in fresh(python, exports)]
        wrong += sum(one != other for one, other in zip(completed, new, strict=True))
    wrong += refused(job, sender, state, updates, in_memory())
    traffic.stopped = True
    sender.close()
    print(f"{updates} versions, {compared} tensors in memory compared, {wrong} versions wrong")
    print(f"seconds of an update: first {seconds[0]:.2f}, median {np.median(seconds):.2f}")
    print(f"{traffic.done} requests beside them, {traffic.mixed} by two versions")
    return int(wrong > 0 or traffic.mixed > 0)


def refused(
    job: Callable[..., Publisher], sender: Publisher, state: Any, version: int, memory: dict[str, str]
) -> int:
    """How many of these changed something, or were not refused."""
    wrong = 0
    stranger = job(secrets.token_hex(16))
    stranger.publish(state, version + 1)
    wrong += stranger.wait(version + 1, 3.0) or in_memory() != memory
    stranger.close()
    # A version that has not arrived.
    assert call("/start_weight_update", {})[0] == 200
    late = call("/update_weights", {"update_info": {"version": version + 9, "seconds": 0.5}})[0]
    wrong += late == 200 or in_memory() != memory
    call("/finish_weight_update", {})
    print(f"refused a stranger and a version that is missing: {not wrong}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
