"""Templates are rendered in a process whose time and memory are limited."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from zerojax.run.data.chat_template import TemplateProcess
from zerojax.run.data.formats import DataError


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    with closing(TemplateProcess(seconds=0.2, memory=1 << 28)) as process:
        yield process


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (7 ** (7 ** 9)) is odd }}",  # computed when it is compiled
        "{{ lipsum(n=10 ** 9) }}",
    ],
)
def test_a_template_that_computes_without_end_is_refused(process: TemplateProcess, source: str) -> None:
    with pytest.raises(DataError, match=r"one text takes it more than 0.2 s: set data.chat_template"):
        process.render(source, [{}])
    assert process.render("{{ a }}", [{"a": 1}]) == [("1", ())]  # in another process


def test_each_text_has_the_time(process: TemplateProcess) -> None:
    """The first takes about a tenth of it."""
    source = "{% for a in range(99999) %}{% endfor %}{{ a }}"
    assert process.render(source, [{"a": n} for n in range(60)])[59] == ("59", ())


def test_a_template_that_takes_much_memory_is_refused(process: TemplateProcess) -> None:
    with pytest.raises(DataError, match=r"it needs more than 256 MiB: set data.chat_template"):
        process.render("{{ 'x' * a }}", [{"a": 10**9}])


def test_texts_are_as_they_were_written(process: TemplateProcess) -> None:
    source = "{{ a }}{% generation %}{{ b }}{% endgeneration %}"
    every = [{"a": "\ud800\n\u00e4", "b": "12"}, {"a": "\ud800\n", "b": ""}, {"a": "x", "b": "\0"}, {"a": ""}]
    assert process.render(source, every) == [
        ("\ud800\n\u00e412", ((3, 5),)),
        ("\ud800\n", ((2, 2),)),
        ("x\0", ((1, 2),)),
        ("", ((0, 0),)),
    ]


def test_a_process_that_was_killed_is_named_and_replaced(process: TemplateProcess) -> None:
    process.render("", [{}])
    assert process.close() == -9
    assert process.close() == 0
    assert process.render("a", [{}]) == [("a", ())]
