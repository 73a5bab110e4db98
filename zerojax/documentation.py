"""Where the documentation is: beside the package in a checkout, inside it in a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def page(name: str) -> str:
    """The path of a page, such as "migrate", for messages; relative if it is below the current folder."""
    pages = [folder / "docs" / f"{name}.md" for folder in (_PACKAGE, _PACKAGE.parent)]
    found = next((path for path in pages if path.is_file()), None)
    if found is None:
        return f"docs/{name}.md in the source of zerojax"
    return str(found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found)
