"""The README's example, run as it stands."""

import math
import os
import re
import subprocess
import sys


def test_the_example_of_the_readme_trains(request):
    text = (request.config.rootpath / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert math.isfinite(float(done.stdout.split()[0]))
    assert "between nodes" in done.stdout
