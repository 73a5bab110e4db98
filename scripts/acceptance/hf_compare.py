"""Compare zerojax with transformers: logits, round trips, quantized exports, and a fine-tuned model's loss.

Runs in zerojax's environment, with another Python that has torch, transformers and compressed-tensors:

    .venv/bin/python scripts/acceptance/hf_compare.py --reference hf/bin/python

All weights are random; it takes a few minutes on two cores. Ends with an error if a bound is missed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors.numpy import load_file, save_file

from zerojax.cli import main as zerojax
from zerojax.cli.trained import open_trained
from zerojax.interop.huggingface import Direction, Format, WeightFormat
from zerojax.interop.huggingface.source import open_files
from zerojax.interop.huggingface.weight_files import WeightFiles
from zerojax.run.config import MeshSection
from zerojax.run.evaluation import mean_loss
from zerojax.run.inputs import make_batches, prepare_data
from zerojax.run.run_dir import RunFolder
from zerojax.train.gathering import gather_model
from zerojax.zero_config import ZeroConfig

LOGITS_BOUND = 1e-4
LOSS_BOUND = 1e-3
MESH = ("--mesh.nodes", "2", "--mesh.local", "4")
TRAINING = (
    *("--data.source", "docs/*.md", "--zero.preset", "zero++-paper", "--zero.block-size", "64"),
    *("--train.steps", "20", "--train.batch-size", "16", "--train.sequence-length", "32"),
    *("--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "2"),
)


@dataclass(frozen=True)
class Reference:
    """The Python that has transformers."""

    python: str
    folder: Path

    def __call__(self, task: str, folder: Path, tokens: np.ndarray | None = None) -> Path:
        """Run a task of hf_reference.py; returns the path of its output."""
        out, given = self.folder / "out.npz", self.folder / "tokens.npy"
        files = []
        if tokens is not None:
            np.save(given, tokens)
            files = [given, out]
        script = Path(__file__).with_name("hf_reference.py")
        subprocess.run([self.python, script, task, folder, *files], check=True, stderr=subprocess.PIPE)
        return out


def run(*arguments: object) -> None:
    """Run a zerojax command, which must succeed."""
    if code := zerojax([str(word) for word in arguments]):
        raise SystemExit(code)


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """zerojax's logits with the weights of a run, in fp32."""
    run_folder = RunFolder(folder)
    trained = open_trained(run_folder, run_folder.read_config(), MeshSection(nodes=2, local=4))
    return np.asarray(gather_model(trained.state)(tokens))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the safetensors library."""
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def compare_models(models: Path, work: Path) -> Iterator[str]:
    """Import every model, compare its logits, export it, compare every bit."""
    for model in sorted(models.iterdir()):
        expected = np.load(model / "expected.npz")
        run("import", model, work / model.name, *MESH, "--zero.compute-dtype", "float32")
        error = np.abs(logits_of(work / model.name, expected["tokens"]) - expected["logits"]).max()
        assert error < LOGITS_BOUND, f"{model.name}: logits differ by {error}"
        out = work / f"{model.name}-exported"
        run("export", work / model.name, out)
        before, after = tensors(model), tensors(out)
        assert before.keys() == after.keys(), before.keys() ^ after.keys()
        for name, x in before.items():
            y = after[name]
            same = (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
            assert same, f"{model.name}: {name} changed"
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (model / file).read_bytes() == (out / file).read_bytes(), f"{model.name}: {file} changed"
        largest = np.abs(expected["logits"]).max()
        yield f"| {model.name} | {error:.1e} | {largest:.1f} | {len(before)} tensors, bit for bit |"


def compare_fine_tuned(model: Path, work: Path, reference: Reference, dtype: str) -> str:
    """Import, train 20 steps under ZeRO++ on 2 x 4, export, and let transformers measure the loss."""
    folder = RunFolder(work / f"tuned-{dtype}")
    run("import", model, folder.path, *MESH, *TRAINING, "--zero.compute-dtype", dtype)
    run("train", folder.config, "--run-dir", folder.path)
    out = work / f"tuned-{dtype}-exported"
    run("export", folder.path, out)
    config = folder.read_config()
    config = replace(config, zero=ZeroConfig(compute_dtype=np.dtype(dtype)))
    batches, validation = make_batches(config, prepare_data(config, folder))
    batches.close()
    full = float(mean_loss(open_trained(folder, config, config.mesh).state, validation))
    tokens = np.concatenate([batch["tokens"] for batch in validation])
    theirs = json.loads(reference("loss", out, tokens).read_text())
    ours = folder.read_summary()["validation_loss"]  # of int8 weights
    assert abs(ours - theirs) < LOSS_BOUND, f"{dtype}: zerojax reported {ours}, transformers {theirs}"
    return f"| {dtype} | {ours:.6f} | {full:.6f} | {theirs:.6f} | {abs(ours - theirs):.1e} |"


def compare_quantized(tuned: Path, work: Path, reference: Reference, tokens: np.ndarray) -> Iterator[str]:
    """Export in every format; transformers must decode what zerojax's codec decodes, bit for bit."""
    for weights in get_args(Format):
        for along in get_args(Direction):
            out = work / f"{weights}-{along}"
            run("export", tuned, out, "--weights", weights, "--block-size", "64", "--along", along)
            theirs = np.load(reference("inspect", out, tokens))
            files = WeightFiles(out, WeightFormat(weights, 64, along))
            for name, spec in files.specs.items():
                ours = files.read(name, *(slice(None) for _ in spec.shape)).astype(np.float32)
                assert ours.tobytes() == theirs[name].tobytes(), f"{out.name}: {name} is decoded differently"
            report = json.loads((out / "zerojax.json").read_text())
            size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
            yield (
                f"| {weights} | {along} | {size:,} | {report['perplexity']:.4f} | "
                f"{report['perplexity_full']:.4f} |"
            )


def compare_fp8_blocks(model: Path, work: Path, reference: Reference, tokens: np.ndarray) -> str:
    """Write a model in fp8 with scales for blocks of 4 x 4; transformers must read the same weights.

    It multiplies in fp32 here, and in a bf16 model rounds as zerojax does.
    """
    out = work / "fp8-blocks"
    shutil.copytree(model, out)
    stored = tensors(model)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        rows, columns = stored[name].shape
        blocks = stored[name].astype(np.float32).reshape(rows // 4, 4, columns // 4, 4)
        scales = np.abs(blocks).max((1, 3), keepdims=True) / 448
        stored[name] = (blocks / scales).astype(float8_e4m3fn).reshape(rows, columns)
        stored[f"{name}_scale_inv"] = scales[:, 0, :, 0]
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    values = json.loads((out / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}
    (out / "config.json").write_text(json.dumps(values))
    theirs, files = np.load(reference("inspect", out, tokens)), open_files(out)
    for name in files.specs:
        ours, wanted = files.read(name), theirs[name].astype(bfloat16)
        assert ours.tobytes() == wanted.tobytes(), f"{out.name}: {name} is decoded differently"
    return f"{len(files.specs)} tensors in fp8 by blocks are read as by transformers, bit for bit"


def main() -> None:
    """Run all comparisons and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", required=True, help="a Python with torch and transformers")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        reference = Reference(parser.parse_args().reference, work)
        models = work / "models"
        reference("make", models)
        lines = ["| model | largest difference of logits | largest logit | round trip |", "|---|---|---|---|"]
        lines += compare_models(models, work)
        lines += [
            "",
            "| compute dtype | loss reported | with full weights | by transformers | difference |",
            "|---|---|---|---|---|",
        ]
        for dtype in ("float32", "bfloat16"):
            lines.append(compare_fine_tuned(work / "fresh", work, reference, dtype))
        lines += ["", "| weights | along | bytes | perplexity | full |", "|---|---|---|---|---|"]
        tokens = np.load(models / "llama2" / "expected.npz")["tokens"]
        lines += compare_quantized(work / "tuned-float32", work, reference, tokens)
        lines += ["", compare_fp8_blocks(models / "qwen3", work, reference, tokens)]
        print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
