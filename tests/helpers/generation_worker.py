"""One of several processes that generate: ``python generation_worker.py PORT RANK PROCESSES FOLDER``."""

import sys
from pathlib import Path

import jax
import numpy as np
from generation_models import CONTEXT, SMALL, create, prompts

import zerojax


def main(port: str, rank: int, processes: int, folder: Path) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    state = create(SMALL, processes, 2)
    own = prompts(10)[rank * 5 :][:5]
    for form in ("gathered", "compute"):
        got = zerojax.generate(state, own, 6, seed=3, weights=form, slots=1)
        np.savez(folder / f"{form}{rank}.npz", *got)
    refused = []
    for some in (own[: 5 - rank], own if rank else [np.zeros(CONTEXT, np.int32)] * 5):
        try:
            zerojax.generate(state, some, 6)
        except zerojax.ZeroError as error:
            refused.append(str(error))
    (folder / f"refused{rank}").write_text("\n".join(refused))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
