"""All combinations of model, stage, mesh and optimizer of ``tests/train/test_equivalence.py``.

It compiles about three hundred programs, which takes an hour or more on two cores; CI runs a covering subset:

    python scripts/acceptance/equivalence.py [models...]
"""

import itertools
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"


def main(names: list[str]) -> int:
    """Compare all cases and print a line for each; returns how many differ."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=12"
    sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "train")]
    import jax
    import test_equivalence as part

    chosen = names or ["nnx", "stack", "linen", "linen-scan", "gpt-tied", "awkward", "ragged"]
    recipes = ((part.momentum, {}), (part.momentum_with_decay, {}), (part.adamw, part.ADAM_WITHIN))
    differ = 0
    for name, (tx, within), stage, mesh in itertools.product(chosen, recipes, part.STAGES, part.MESHES):
        try:
            part.check(name, tx, mesh, stage=stage, **within)
            verdict = "equal"
        except AssertionError as error:
            differ += 1
            verdict = f"DIFFERS: {str(error).strip().splitlines()[0]}"
        print(f"{name:12} {tx.__name__:20} stage {stage} on {mesh}: {verdict}", flush=True)
        jax.clear_caches()
    print(f"{differ} differ")
    return differ


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
