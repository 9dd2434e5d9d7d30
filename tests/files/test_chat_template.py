"""Chat templates: what `transformers` makes of them, and nothing that a template may try."""

import io
import json
import os
import resource
import runpy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minitri.files.checkpoint import load_tokenizer
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder
from minitri.text import sandbox, tokenizer
from minitri.text.sandbox import Sandbox
from minitri.text.special_tokens import SpecialTokens
from minitri.text.tokenizer import Tokenizer
from tests.conftest import byte_level_tokenizer, refused
from tests.core.rigs import tiny_config
from tests.files.gguf_writer import write_gguf

CONFIG = tiny_config(vocab_size=320, eos_token_ids=(2,))
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who is <Anne> & 'why'?\n"},
    {"role": "assistant", "content": "Anne Elliot."},
    {"role": "user", "content": "日本語"},
]
TEMPLATES = Path(__file__).parent / "templates"
CHATML, LLAMA3, MISTRAL = (
    (TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in ("chatml", "llama3", "mistral")
)
NEEDS_PAIRS = "{{ raise_exception('Roles must alternate') if messages|length == 2 else 'fine' }}"
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def renders(template):
    """The function that renders conversations by a template."""
    return Tokenizer(byte_level_tokenizer(), SpecialTokens(texts=ENDS), template).render_chat


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, NEEDS_PAIRS])
def test_a_conversation_reads_as_in_transformers(template):
    from transformers import PreTrainedTokenizerFast

    words = byte_level_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **ENDS)
    ours = renders(template)
    for messages in (TALK, TALK[1:2], TALK[:3]):
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours(messages) == wanted


def test_a_developer_is_the_system_where_a_template_does_not_know_the_role():
    talk = [{"role": "developer", "content": "Be brief."}, *TALK[1:]]
    made = renders(CHATML)
    assert made(talk) == made(TALK)
    knowing = renders(CHATML + "{# developer #}")
    assert "<|im_start|>developer\nBe brief." in knowing(talk)


@pytest.fixture
def with_template(tmp_path):
    """Gives a folder, whose tokenizer has control tokens, a template."""
    pipeline = byte_level_tokenizer()
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    pipeline.save(str(tmp_path / "tokenizer.json"))

    def with_template(template):
        content = {"chat_template": template, "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        return load_tokenizer(Folder(tmp_path), CONFIG)

    return with_template


def test_control_tokens_are_tokens_and_bos_is_not_doubled(with_template):
    tokenizer = with_template("{{ bos_token }}" + CHATML)
    ids = tokenizer.encode_chat(TALK)
    named = [tokenizer.token(number) for number in ids]
    assert named[0] == "<s>"
    counts = [named.count(name) for name in ("<s>", "<|im_start|>", "<|im_end|>")]
    assert counts == [1, 5, 4]
    assert "Who is <Anne> & 'why'?" in tokenizer.decode(ids)


def test_of_several_templates_the_default_counts_and_a_file_counts_most(with_template, tmp_path):
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert with_template(several).render_chat([]) == "D"
    assert with_template(several[:1]).chat_template == ""
    file = tmp_path / "chat_template.jinja"
    file.write_text("F{{ bos_token }}{{ eos_token }}")
    assert with_template(several).render_chat([]) == "F<s>"  # eos_token has no name there
    tools = tmp_path / "additional_chat_templates/tool_use.jinja"
    tools.parent.mkdir()
    tools.write_text("U")
    changes = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "U"}
    gguf = write_gguf(tmp_path / "x.gguf", CONFIG, byte_level_tokenizer(), changes=changes)
    for made in (with_template(several), load_tokenizer(GgufFile(gguf), CONFIG)):
        assert made.render_chat([], [{}]) == "U"
    file.write_bytes(b"\xff")
    with refused("the tokenizer of", "codec can't decode"):
        with_template(several)


BAD = Path(__file__).with_name("bad_templates.txt").read_text("utf-8").splitlines()


@pytest.mark.parametrize("line", [*BAD, f"{NEEDS_PAIRS} => Roles must alternate"])
def test_what_a_template_may_not_do_is_one_line(line, monkeypatch):
    """More time or memory than the limits is refused, too."""
    template, problem = line.rsplit(" => ", 1)
    monkeypatch.setattr(tokenizer, "SANDBOX", Sandbox("render", 0.3, 1 << 29))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused("chat template", problem):
        renders(template)(TALK[:2])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_what_a_template_may_not_see_is_empty():
    template = "{{ messages.__class__ }}{{ '{0.__class__}'.format(messages) }}"
    assert renders(template)(TALK) == ""


def test_a_long_document_is_no_attack():
    talk = [{"role": "user", "content": "word " * 200_000 + str(i)} for i in range(5)]
    assert len(renders(LLAMA3)(talk)) > 5_000_000


def test_processes_stay_and_one_that_ends_is_replaced():
    rendering = Sandbox("render", 1, 1 << 29)
    refuse, echo = (["{{ raise_exception('no') }}", {}], ["{{ x }}", {"x": "y"}])
    assert rendering.ask(echo) == "y"
    [child] = rendering.idle
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            rendering.ask(refuse)
        assert rendering.ask(echo) == "y"
        assert rendering.idle == [child]
    child.kill()
    child.wait()
    assert rendering.ask(echo) == "y"
    with pytest.raises(TypeError):
        rendering.ask([b"no JSON"])
    assert rendering.idle
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(rendering.ask, [echo] * 40)] == ["y"] * 40
    assert len(rendering.idle) <= 2


def test_without_limits_nothing_is_rendered(monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(sandbox, "find_spec", lambda _: None)
    with refused("run within limits", "use Linux"):
        renders(CHATML)(TALK)


def test_a_fork_renders_in_processes_of_its_own():
    render = renders("{{ messages[0].content }}")
    assert render([{"content": "before"}]) == "before"
    if not (pid := os.fork()):
        ok = all(render([{"content": "child"}]) == "child" for _ in range(50))
        os._exit(0 if ok else 1)
    for _ in range(50):
        assert render([{"content": "parent"}]) == "parent"
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(("held", "stack"), [(-1, 1 << 20), (1 << 21, 1 << 20), (1 << 26, 1 << 22)])
def test_the_program_of_a_sandbox_limits_itself_and_answers_line_by_line(
    held, stack, monkeypatch, capsys
):
    """The stack is half of what a thread has, at most 4 MiB; only computing is timed."""
    limits, timers = {}, []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (held, -1))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.update({what: limit}))
    monkeypatch.setattr(signal, "setitimer", lambda *timer: timers.append(timer))
    monkeypatch.setattr(sys, "argv", ["", "render", "2.5", "4096"])
    marked = "{% generation %}{{ x|tojson }}{% endgeneration %}{{ strftime_now('%%') }}"
    given = {"x": "<é>", "messages": [1, 2]}
    lines = [json.dumps([source, given]) for source in (marked, NEEDS_PAIRS, "{% if %}")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    runpy.run_path(sandbox.PROGRAM, run_name="__main__")
    marks, refused, wrong = map(json.loads, capsys.readouterr().out.splitlines())
    assert marks == {"text": '"<é>"%'}
    assert refused == {"error": "TemplateError: Roles must alternate"}
    assert wrong["error"].startswith("TemplateSyntaxError: ")
    kinds = (resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_CORE)
    assert limits == {
        kind: (size, size) for kind, size in zip(kinds, (stack, 4096, 0), strict=True)
    }
    assert timers == [(signal.ITIMER_PROF, seconds) for _ in lines for seconds in (2.5, 0)]
