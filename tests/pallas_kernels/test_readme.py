"""The example in the package's README runs, without zerojax."""

import subprocess
import sys

from environment import ROOT


def test_example_runs_by_itself(tmp_path):
    text = (ROOT / "pallas_kernels" / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    check = "\nimport sys\nassert not any(name.split('.')[0] == 'zerojax' for name in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", example + check],
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.4  # the mean's worst error, in units of the standard deviation
