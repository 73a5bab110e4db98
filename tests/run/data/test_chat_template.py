"""Chat templates render as in transformers, in a limited process, and mark the text that counts."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from environment import ROOT

from zerojax.run.data import chat_template
from zerojax.run.data.chat_template import CHATML, ChatTemplate, TemplateProcess, find_template, load_template
from zerojax.run.data.formats import DataError

FIXTURES = ROOT / "tests" / "fixtures" / "chat"
KNOWN = json.loads((FIXTURES / "rendered.json").read_text())
TEMPLATES = {path.stem: path.read_text() for path in FIXTURES.glob("*.jinja")}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], KNOWN["special_tokens"])


def chat(*contents: str) -> list[dict[str, Any]]:
    """A conversation of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def learned(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    """What counts of a conversation's text."""
    text, ranges = template.render_targets(messages)
    assert text == template.render(messages)
    return [text[start:end] for start, end in ranges]


BLOCKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("source", [BLOCKS, PLAIN], ids=["blocks", "plain"])
def test_messages_of_weight_0_do_not_count(source: str) -> None:
    messages = chat("a", "b", "c", "d")
    assert learned(ChatTemplate(source), messages) == ["b.", "d."]
    messages[1]["weight"] = 0
    assert learned(ChatTemplate(source), messages) == ["d."]
    messages[3]["weight"] = 0
    with pytest.raises(DataError, match="nothing to learn"):
        ChatTemplate(source).render_targets(messages)


def test_weights_need_a_block_for_each_message() -> None:
    twice = ChatTemplate(BLOCKS.replace(".{%", "{% endgeneration %}{% generation %}.{%"))
    messages = chat("a", "b", "c", "d")
    messages[1]["weight"] = 0
    with pytest.raises(DataError, match="marks 4 texts in 2 messages of the assistant"):
        twice.render_targets(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_transformers_does(name: str) -> None:
    rows = [row for row in KNOWN["rendered"] if row["template"] == name]
    assert len(rows) == 12
    for row in rows:
        messages, prompt = KNOWN["conversations"][row["conversation"]], row["add_generation_prompt"]
        if "error" in row:
            with pytest.raises(DataError, match=row["error"].split("/")[0]):
                template(name).render(messages, add_generation_prompt=prompt)
            continue
        assert template(name).render(messages, add_generation_prompt=prompt) == row["text"], row
        if not prompt and row.get("ranges"):
            assert template(name).render_targets(messages)[1] == tuple(map(tuple, row["ranges"]))


def test_tools_their_calls_and_lists_of_texts_are_rendered_as_transformers_does() -> None:
    for case in KNOWN["tools"]:
        assert template("tools").render(case["messages"], tools=case["tools"]) == case["text"]
    # What a template does not write is refused; a list of texts is joined for those that read none.
    call, tools = (KNOWN["tools"][0][name] for name in ("messages", "tools"))
    assert "What is 1 + 2?  Be brief.<|im_end|>" in template("chatml").render(call[:1])
    with pytest.raises(DataError, match="does not write the tools"):
        template("chatml").render(call[:1], tools=tools)
    with pytest.raises(DataError, match="message 1 has tool calls in place of a content"):
        template("chatml").render(call)


def test_the_built_in_template_is_the_published_one() -> None:
    for messages in KNOWN["conversations"].values():
        for prompt in (False, True):
            ours = ChatTemplate(CHATML).render(messages, add_generation_prompt=prompt)
            assert ours == template("chatml").render(messages, add_generation_prompt=prompt)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("chatml", ["b<|im_end|>\n", "e & f<|im_end|>\n"]),
        ("headers", ["b<|eot_id|>", "e & f<|eot_id|>"]),
        ("instruct", [" b </s>", " e & f </s>"]),
        ("turns", ["b<end_of_turn>\n", "e & f<end_of_turn>\n"]),
        ("generation", ["b</s>", "e & f</s>"]),
    ],
)
def test_the_assistants_turns_count_with_what_ends_them(name: str, turns: list[str]) -> None:
    assert learned(template(name), chat("a", "b", "c", "e & f")) == turns


NUMBERED = PLAIN.replace("[{{ m.role }}]", "[{{ loop.index }} {{ m.role }}]")
AT_THE_END = PLAIN.replace(".{%", ".{% if not loop.last %} {% endif %}{%", 1).replace("%}[a", "%} [a")


def agent(calls: int) -> list[dict[str, Any]]:
    """A conversation in which the assistant calls a tool after most of its messages."""
    pair = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "3"}]
    steps = [{**message, "content": f"{message['content']} {i}"} for i in range(calls) for message in pair]
    return [{"role": "system", "content": "s"}, *chat("a"), *steps, *chat("b", "c")[::-1], *chat("d", "e")]


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        *(
            (TEMPLATES[name], chat(*map(str, range(150))))
            for name in ("chatml", "headers", "instruct", "turns")
        ),
        *((TEMPLATES[name], agent(60)) for name in ("chatml", "headers", "tools")),
        (AT_THE_END, agent(60)),
    ],
)
def test_a_long_conversation_is_rendered_in_stretches(
    source: str, messages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = 0

    def render(source: str, every: Any) -> Any:
        nonlocal rendered
        rendered += sum(len(variables["messages"]) for variables in every)
        return original(source, every)

    original = chat_template._PROCESS.render
    monkeypatch.setattr(chat_template._PROCESS, "render", render)
    messages[-1]["weight"] = messages[3]["weight"] = messages[4]["weight"] = 0
    found = ChatTemplate(source, KNOWN["special_tokens"])
    quick, rendered_quick, rendered = found.render_targets(messages), rendered, 0
    monkeypatch.setattr(chat_template, "_STRETCH", 10**6)
    assert quick == found.render_targets(messages)
    assert rendered_quick < rendered / 3
    assert len(quick[1]) > 50


def test_a_template_that_numbers_all_messages_is_rendered_as_a_whole() -> None:
    long = chat(*map(str, range(100)))
    assert learned(ChatTemplate(NUMBERED.replace("[assistant]", "[")), long)[-1] == "100 assistant]99."
    with pytest.raises(DataError, match="messages up to 1 differently"):
        template("thinking").render_targets(long)


def test_an_answer_may_begin_with_what_the_template_adds() -> None:
    assert learned(template("thinking"), chat("a", "b")) == ["<think>\n\n</think>\n\nb<|im_end|>\n"]


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("thinking", chat("a", "b", "c", "d"), r"messages up to 1 differently .*\{% generation %\}"),
        ("chatml", chat("a"), "no message of the assistant"),
        ("generation", chat("a"), "no message of the assistant"),
        ("instruct", [*chat("a"), *chat("b", "c")], "roles must alternate"),
    ],
)
def test_a_conversation_without_a_clear_answer_is_refused(name: str, messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        template(name).render_targets(messages)


def test_a_generation_prompt_that_does_not_begin_an_answer_is_said_to_be_that() -> None:
    # trim_blocks takes the line break after "{% if true %}".
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if true %}\n{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    )
    found = ChatTemplate(source, name="the chat template in here.jinja")
    message = r"in here.jinja ends a prompt with '<.assistant.>.n', .* as '<.assistant.>b<.end.>', which"
    with pytest.raises(DataError, match=message):
        found.render_targets(chat("a", "b"))
    with pytest.raises(DataError, match=message):
        found.render_response(chat("a", "b"))


def test_the_end_of_a_turn() -> None:
    ends = {name: template(name).turn_end for name in TEMPLATES}
    assert ends == {
        "chatml": "<|im_end|>\n",
        "generation": "</s>",
        "headers": "<|eot_id|>",
        "instruct": " </s>",
        "thinking": "<|im_end|>\n",
        "tools": "<|im_end|>\n",
        "turns": "<end_of_turn>\n",
    }


EACH = "{% for m in messages %}[{{ m.role }}]"
OUTSIDE = (
    EACH + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<end>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (EACH + "{{ m.content }}{% endfor %}", "nothing after an assistant's message"),
        (EACH + "{% endfor %}", "nothing after an assistant's message|nothing to learn"),
        (OUTSIDE + "{% endfor %}", "'<end>', which ends an assistant's message, outside"),
        (EACH, r"line 1: .*endfor"),
        ("{{ messages[5].role }}", "has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 10**5000 }}", "ValueError: Exceeds the limit"),
        ("{% continue %}", "SyntaxError: 'continue' not properly in loop"),
        ("{{ messages|dictsort }}", "AttributeError: 'list' object has no attribute 'items'"),
        ("{{ 'a'|truncate(-1) }}", "AssertionError: expected length"),
        ("{{ 'a' * 9**15 }}", "it needs more than 1024 MiB: set data.chat_template"),
        ("{{ 'a' * 2 * 10**9 }}", "it needs more than 1024 MiB: set data.chat_template"),
        ("{{ 'a' * 10**8 }}", "it writes more than 67,108,864 characters"),
        (
            "{% for a in messages %}" * 150 + "{% endfor %}" * 150,
            "RecursionError|SyntaxError|Indentation",
        ),
        ("{{ raise_exception('a' * 10**7) }}", "the chat template: a{400,1000}$"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _ = ChatTemplate(source).turn_end


class TestFiles:
    def test_a_template_is_found_beside_its_tokenizer(self, tmp_path: Path) -> None:
        assert find_template(tmp_path) is None
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({"chat_template": "one"}))
        assert find_template(tmp_path) == ChatTemplate("one", name=f"the chat template in {config}")
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
        config.write_text(json.dumps({"chat_template": named}))
        assert load_template("tokenizer", str(tmp_path / "tokenizer.json")).source == "two"
        file = tmp_path / "chat_template.jinja"
        file.write_text("three")
        assert find_template(tmp_path) == ChatTemplate("three", name=f"the chat template in {file}")
        assert load_template(str(file), "byte") == find_template(tmp_path)

    @pytest.mark.parametrize("tokenizer", ["byte", "bpe", "elsewhere/tokenizer.json"])
    def test_none_says_which_to_choose(self, tokenizer: str) -> None:
        with pytest.raises(DataError, match=r"no chat template: set data.chat_template to 'chatml'"):
            load_template("tokenizer", tokenizer)

    def test_a_wrong_one_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="'tokenizer', 'chatml' or an existing file"):
            load_template("nowhere.jinja", "byte")
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
        with pytest.raises(DataError, match="should be a string"):
            find_template(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("a" * (1 << 20) + "b")
        with pytest.raises(DataError, match=r"chat_template.jinja: more than 1,048,576 characters"):
            find_template(tmp_path)
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(DataError, match=r"not valid UTF-8: .* position 0"):
            find_template(tmp_path)


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
    with pytest.raises(DataError, match=r"rendering one text takes more than 0.2 s: set data.chat_template"):
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
