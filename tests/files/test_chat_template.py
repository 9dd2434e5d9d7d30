"""Chat templates: what `transformers` makes of them, and nothing that a template may try."""

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

import minitri
from minitri import InputError
from minitri.text import chat_template
from minitri.text.chat_template import ChatTemplate
from tests.conftest import byte_level_tokenizer, write_hf_folder

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who is <Anne> & 'why'?\n"},
    {"role": "assistant", "content": "Anne Elliot."},
    {"role": "user", "content": "日本語"},
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(index=0) -%}
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{% set ns.index = ns.index + 1 %}
[INST] {{ message['content'] }} #{{ ns.index }} [/INST]
{% elif message['role'] == 'assistant' %}
{% generation %} {{ message['content'] | tojson }}{{ eos_token }}{% endgeneration %}
{% elif message['role'] == 'system' %}{% continue %}
{% else %}{{ raise_exception('Only user and assistant!') }}{% endif %}
{% endfor %}"""
DOUBLED = "{%% set it = namespace(x=%s) %%}{%% for i in range(99) %%}"
DOUBLED += "{%% set it.x = it.x %s it.x %%}{%% endfor %%}"
NESTED = "{%% for a in range(99999) %%}{%% for b in range(99999) %%}%s{%% endfor %%}{%% endfor %%}"
TOOLS = """{{ {'b': 1, 'a': [messages, 2.5, none]} | tojson(indent=2) | indent(2, true) }}
{{ messages | map(attribute='role') | join(', ') | replace('u', 'UU') }}
{{ ', '.join(['a', 'b']).replace('a', 'c', 1) }}
{{ [1, 'a'] }}{{ 'a,b'.split(',')[-1] }}{{ messages[1:] | length }}
{{ messages[0].content.strip() | upper }}{{ {'a': 1}.items() | list }}{{ 'x' | tojson }}
{% set it = namespace(n=0) %}{% set it.n = it.n + 7 % 4 %}{{ it.n }}{{ 'a b'.split() }}"""
DAG = "{% set it = namespace(x=[1]) %}{% for i in range(99) %}{% set it.x = [it.x, it.x] %}"
DAG += "{% endfor %}"
LIMIT = "takes more than 0.3 seconds, or too much memory|MemoryError|OverflowError|Range too big"
NEEDS_PAIRS = "{{ raise_exception('Roles must alternate') if messages|length == 2 else 'fine' }}"


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, TOOLS, NEEDS_PAIRS])
@pytest.mark.parametrize("messages", [TALK, TALK[1:2], TALK[:3]])
def test_a_conversation_reads_as_in_transformers(template, messages):
    from transformers import PreTrainedTokenizerFast

    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    words = byte_level_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **ends)
    wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(template, ends)
    assert ours.render(messages) == wanted


def test_a_developer_is_the_system_where_a_template_does_not_know_the_role():
    talk = [{"role": "developer", "content": "Be brief."}, *TALK[1:]]
    made = ChatTemplate(CHATML, {})
    assert made.render(talk) == made.render(TALK)
    knowing = ChatTemplate(CHATML + "{# developer #}", {})
    assert "<|im_start|>developer\nBe brief." in knowing.render(talk)


@pytest.fixture
def with_template(tmp_path):
    """A folder whose tokenizer has control tokens, and a way to give it a template."""
    folder = write_hf_folder(tmp_path / "tiny", vocab_size=330)
    pipeline = byte_level_tokenizer()
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    pipeline.save(str(folder / "tokenizer.json"))

    def write(template):
        content = {"chat_template": template, "bos_token": {"content": "<s>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
        return minitri.load(folder, device="cpu").tokenizer

    return folder, write


def test_control_tokens_are_tokens_and_bos_is_not_doubled(with_template):
    _, write = with_template
    tokenizer = write("{{ bos_token }}" + CHATML)
    ids = tokenizer.encode_chat(TALK)
    named = [tokenizer.token(number) for number in ids]
    assert named[0] == "<s>"
    counts = [named.count(name) for name in ("<s>", "<|im_start|>", "<|im_end|>")]
    assert counts == [1, 5, 4]
    assert "Who is <Anne> & 'why'?" in tokenizer.decode(ids)


def test_of_several_templates_the_default_counts_and_a_file_counts_most(with_template):
    folder, write = with_template
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert write(several).chat_template.render([]) == "D"
    assert write(several[:1]).chat_template is None
    (folder / "chat_template.jinja").write_text("F{{ bos_token }}{{ eos_token }}")
    assert write(several).chat_template.render([]) == "F<s></s>"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="tokenizer of .*UnicodeDecodeError"):
        write(several)


def test_a_model_without_a_template_says_so(engine):
    assert engine.tokenizer.chat_template is None
    with pytest.raises(InputError, match="this model has no chat template"):
        engine.tokenizer.encode_chat(TALK)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% if %}", "is not valid"),
        ("{{ messages[0].__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ raise_exception.__globals__.x }}", "access to attribute '__globals__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "access to attribute '__init__'"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10000000000000000 }}", LIMIT),
        ("{{ 9 ** 999999999 }}", LIMIT),
        *((DOUBLED % it, LIMIT) for it in [("'x'", "~"), ("'x'", "+"), ("[1]", "+"), ("3", "*")]),
        (NESTED % "{{ 'x' * 1000 }}", LIMIT),
        ("{% set x %}" + NESTED % "{{ 'x' * 1000 }}" + "{% endset %}", LIMIT),
        (NESTED % "", LIMIT),
        ("{% macro f(n) %}" + "{{ f(n + 1) if n < 99 }}" * 2 + "{% endmacro %}{{ f(0) }}", LIMIT),
        ("{{ 'x'.ljust(2000000000) }}", LIMIT),
        ("{{ (1).to_bytes(2000000000) }}", LIMIT),
        ("{{ '{:2000000000}'.format(1) }}", LIMIT),
        ("{{ 'x'|center(2000000000) }}", LIMIT),  # a constant, computed before a rendering
        ("{{ '%2000000000d' % 1 }}", LIMIT),
        ("{{ '%*d' % (2000000000, messages|length) }}", LIMIT),
        ("{{ ['x', '%500000000d' % 1, '%500000000d' % 2] }}", LIMIT),
        ("{{ {'a': [1]}|tojson(indent=2000000000) }}", LIMIT),
        ("{{ 'a\n'|indent(2000000000, true) }}", LIMIT),
        ("{{ ('x' * 99999)|replace('x', 'x' * 99999) }}", LIMIT),
        ("{{ (['x' * 99999] * 99999)|join }}", LIMIT),
        ("{{ ['x' * 99999] * 99999 }}", LIMIT),
        (DAG + "{{ it.x }}", LIMIT),
        (DAG + "{% set x = it.x %}" + DAG + "{{ x == it.x }}", LIMIT),  # in one instruction
        ("{{ lipsum(999999) }}", LIMIT),
        ("{{ '%199999999d' % 1 }}", LIMIT + "|the text is too long"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0]['role'].foo.bar }}", "has no attribute 'foo'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 5 + 'a' }}", "unsupported operand"),
        (NEEDS_PAIRS, "Roles must alternate"),
    ],
)
def test_what_a_template_may_not_do_is_one_line(template, problem, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=problem) as error:
        ChatTemplate(template, {}).render(TALK[:2])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB
    assert "\n" not in str(error.value)
    assert "chat template" in str(error.value)


def test_what_a_template_may_not_see_is_empty():
    for template in ("{{ messages.__class__ }}", "{{ '{0.__class__}'.format(messages) }}"):
        assert ChatTemplate(template, {}).render(TALK) == ""


def test_a_long_document_is_no_attack():
    """Of a million tokens, in a conversation of several turns."""
    talk = [{"role": "user", "content": "word " * 200_000 + str(i)} for i in range(5)]
    for template in (CHATML, LLAMA3):
        assert len(ChatTemplate(template, {"bos_token": "<s>"}).render(talk)) > 5_000_000


def test_processes_stay_and_one_that_ends_is_replaced():
    template = ChatTemplate("{{ raise_exception(messages[0].role) if messages }}{{ 'x' }}", {})
    [child] = template._idle
    for _ in range(3):
        with pytest.raises(InputError, match="user"):
            template.render(TALK[1:])
        assert template.render([]) == "x"
        assert template._idle == [child]
    child.kill()
    child.wait()
    with pytest.raises(InputError, match="seconds"):
        template.render([])
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(template.render, [[]] * 40)] == ["x"] * 40
    assert len(template._idle) <= 2


def test_without_limits_nothing_is_rendered(monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(chat_template, "find_spec", lambda _: None)
    monkeypatch.setattr(chat_template.subprocess, "Popen", None)
    with pytest.raises(
        InputError, match=r"^chat templates run within limits .* without --chat, or"
    ):
        ChatTemplate(CHATML, {})


def test_a_fork_renders_in_processes_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}", {})
    if not (pid := os.fork()):
        ok = all(template.render([{"content": "child"}]) == "child" for _ in range(50))
        os._exit(0 if ok else 1)
    for _ in range(200):
        assert template.render([{"content": "parent"}]) == "parent"
    assert os.waitpid(pid, 0)[1] == 0
