"""Templates: what models use works, what strangers might write does no harm."""

import json
from pathlib import Path

import pytest

from services.common.errors import ConfigError, InvalidRequest
from services.router.text.chat_template import ChatTemplate
from tests.unit.router.vocabulary import TEMPLATE

USER = {"role": "user", "content": "Hi {{ not_a_template }}"}


def test_generation_prompt_and_plain_content() -> None:
    rendered = ChatTemplate(TEMPLATE, {}).render([USER])
    assert rendered == (
        "<|im_start|>user\nHi {{ not_a_template }}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_as_template_authors_expect() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([USER]) == USER["content"] + "\n"


def test_special_tokens_loop_controls_and_json() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "<é>"}, USER]
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == (
        '<s>{"role": "user", "content": "<é>"}'
    )


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ raise_exception('no') }}", id="raises"),
        pytest.param("{{ messages[0].content.nothing.more }}", id="undefined"),
        pytest.param("{{ ''.__class__.__mro__ }}{{ ''.__class__.x() }}", id="escapes"),
        pytest.param("{{ messages.append(1) }}", id="changes its input"),
        pytest.param("{{ 1 + 'a' }}", id="type error"),
        pytest.param("{{ 1 / 0 }}", id="arithmetic"),
    ],
)
def test_template_errors_are_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render([USER])
    assert caught.value.param == "messages"


def test_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"chat_template": "{{ eos_token }}", "eos_token": "</s>"}, "</s>", id="text"),
        pytest.param(
            {"chat_template": "{{ eos_token }}", "eos_token": {"content": "</s>"}},
            "</s>",
            id="token object",
        ),
        pytest.param(
            {
                "chat_template": [
                    {"name": "rag", "template": "a"},
                    {"name": "default", "template": "b"},
                ]
            },
            "b",
            id="named",
        ),
        pytest.param({}, None, id="none"),
    ],
)
def test_load(tmp_path: Path, config: dict[str, object], expected: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert (template and template.render([USER])) == expected


def test_separate_template_file_wins(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render([USER]) == "new"
