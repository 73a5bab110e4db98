"""``zerojax report RUN``: write an HTML report of a run."""

from dataclasses import dataclass
from pathlib import Path

from zerojax.cli.options import RunPath, read_options
from zerojax.errors import file_errors
from zerojax.run.html_report import RunData, render
from zerojax.run.run_dir import RunFolder, write_whole


@dataclass(frozen=True)
class Options:
    """Write a self-contained HTML report of a run, finished or not.

    Attributes:
        run: The run's folder.
        out: File to write; RUN/report.html by default.
    """

    run: RunPath
    out: Path | None = None


def run(arguments: list[str]) -> None:
    """Read the run's files and write the page."""
    options = read_options(Options, "report", arguments)
    out = options.out or options.run / "report.html"
    page = render(RunData(RunFolder(options.run)))
    with file_errors(out, what="cannot write the report: "):
        if out.is_file() or not out.exists():
            write_whole(out, page)
        else:  # such as /dev/stdout
            out.write_text(page, encoding="utf-8")
    print(f"{out}: {len(page) / 1000:.0f} kB")
