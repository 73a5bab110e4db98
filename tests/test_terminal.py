"""zerojax.terminal: output that does not hold up its writers."""

import os
import re
import subprocess
import sys
import time

import pytest
from environment import ROOT
from stopped_reader import full_pipe

LINES = 5000

# By its file: the package imports JAX.
IMPORT = f"import sys; sys.path.append({str(ROOT / 'zerojax')!r}); import terminal\n"

CHATTY = (
    IMPORT
    + f"""
import time
begun = time.monotonic()
for number in range({LINES}):
    terminal.stdout.write(f"line {{number}}\\n")
print(time.monotonic() - begun, file=sys.stderr, flush=True)
sys.stdin.readline()
terminal.stdout.write("at last\\n")
"""
)


def test_lines_that_nobody_reads_are_dropped_and_counted():
    with full_pipe() as (reader, writer):
        command, pipe = [sys.executable, "-c", CHATTY], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=writer, stderr=pipe) as process:
            os.close(writer)
            assert process.stdin is not None
            assert process.stderr is not None
            assert (
                float(process.stderr.readline()) < 5
            )  # each may wait a little, all of them together may not
            text = b""
            while b"line 1\n" not in text:  # so line 0 has left the queue, and there is room for another
                text += os.read(reader, 1 << 16)
            process.stdin.close()
            while part := os.read(reader, 1 << 16):
                text += part
    assert process.returncode == 0
    lines = text.decode().lstrip("\n").splitlines()
    kept, counts = lines[:-2], lines[-2:]
    assert kept == [f"line {number}" for number in range(len(kept))]
    assert 100 < len(kept) < LINES
    dropped = re.fullmatch(r"zerojax: ([\d,]+) lines dropped: nobody read them", counts[0])
    assert dropped is not None
    assert len(kept) + int(dropped[1].replace(",", "")) == LINES
    assert counts[1] == "at last"


def test_the_end_of_a_process_waits_for_a_reader_that_is_slow():
    code = IMPORT + "terminal.stdout.write('x' * 200_000 + '\\nend\\n')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.5)  # longer than a writer waits
        assert process.stdout.read().endswith(b"\nend\n")
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_streams_that_replace_those_of_the_process_are_written_to(name: str):
    code = (
        IMPORT
        + f"""
import io
from contextlib import redirect_{name}
with redirect_{name}(io.StringIO()) as text:
    terminal.{name}.write("inside")
terminal.{name}.write("outside " + text.getvalue() + "\\n")
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert getattr(done, name) == "outside inside\n"
