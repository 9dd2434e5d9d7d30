"""The page: what a person sees and does, in a real browser; and what it is made of."""

import base64
import hashlib
import html.parser
import re
import threading

import pytest

from minitri.apps.serve.bodies import completion
from minitri.apps.serve.bodies.completion import ResponseBody
from minitri.apps.serve.page import PAGE
from tests.apps.serve.chromium import browsing
from tests.apps.serve.conftest import serving

ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)
IS_DONE = "document.querySelectorAll('.answer .tools').length === 1 && !running"
ANSWER = "[...document.querySelectorAll('.answer .text')].at(-1).textContent"


@pytest.fixture
def page(tmp_path, template):
    with browsing(tmp_path / "profile") as page:
        yield page


def ask(page, question: str, wait: bool = True) -> str | None:
    page.run("$('question').focus()")
    page.type(question)
    page.press(*ENTER)
    if not wait:
        return None
    page.wait(IS_DONE)
    return page.run(ANSWER)


def open_page(page, server, **sampling) -> None:
    page.open(server.url + "/")
    page.wait("modelName !== ''")
    for name, value in ({"max_tokens": 24, "seed": 7} | sampling).items():
        page.run(f"$('{name}').value = '{value}'")


def test_a_question_is_answered_in_colors_with_numbers(page, server):
    open_page(page, server)
    page.run("$('document').value = 'She had been forced into prudence in her youth.'")
    text = ask(page, "Who?")
    content = "She had been forced into prudence in her youth.\n\nWho?"
    fields = {"messages": [{"role": "user", "content": content}], "seed": 7, "max_tokens": 24}
    wanted = server.post("/v1/chat/completions", **fields, temperature=0.7, top_p=0.9).json()
    assert text == wanted["choices"][0]["message"]["content"]
    origins = page.run("[...document.querySelectorAll('.answer .text span')].map(x => x.className)")
    assert len(origins) > 2
    assert {*origins} <= {"draft", "retrieval", "recovered", "bonus"}
    usage = wanted["usage"]
    assert page.run("$('used').textContent") == str(usage["total_tokens"])
    assert page.run("$('context').textContent") == "400"
    share = usage["completion_tokens_details"]["accepted_prediction_tokens"] / 24
    assert page.run("$('accepted').textContent") == f"{round(100 * share)} %"
    assert float(page.run("$('speed').textContent")) > 0
    assert page.log == []


def test_conversations_are_kept_until_they_are_deleted(page, server):
    open_page(page, server)
    text = ask(page, "Who is Anne?")
    page.run("$('new').click()")
    ask(page, "And who else?")
    page.open(server.url + "/?again")
    page.wait("modelName !== '' && talks.length === 2")
    titles = (
        "[...document.querySelectorAll('#saved li button:first-child')].map(x => x.textContent)"
    )
    assert page.run(titles) == ["And who else?", "Who is Anne?"]
    page.run("document.querySelectorAll('#saved li button:first-child')[1].click()")
    assert page.run(ANSWER) == text
    page.run("document.querySelector('[aria-label=\"Delete: Who is Anne?\"]').click()")
    assert page.run(titles) == ["And who else?"]
    assert page.run("JSON.parse(localStorage['minitri.talks']).length") == 1


def test_an_answer_is_stopped_by_escape_and_goes_on(page, engine, template):
    gate, turns = threading.Event(), iter(range(40))
    slow = lambda: next(turns, None) is None and gate.wait(20)  # noqa: E731
    with serving(engine, before=slow) as server:
        open_page(page, server, max_tokens=40)
        ask(page, "Who?", wait=False)
        page.wait("talk.turns[0]?.pieces.length > 0")
        page.press(*ESCAPE)
        page.wait(IS_DONE)
        assert page.run("talk.turns[0].cut") == "stopped"
        gate.set()
        before = page.run(ANSWER)
        ask(page, "/continue")
        after = page.run(ANSWER)
        assert after.startswith(before)
        assert len(after) > len(before)
        ask(page, "/regenerate")
        again = page.run(ANSWER)
        ask(page, "/regenerate")
        assert page.run(ANSWER) == again  # with this seed
        assert page.run("talk.turns.length") == 1
        assert page.log == []


def test_typed_commands_say_what_they_do(page, server):
    open_page(page, server)
    note = "[...document.querySelectorAll('.note')].at(-1).textContent"

    def obey(line: str) -> str:
        page.run("$('question').focus()")
        page.type(line)
        page.press(*ENTER)
        return page.run(note)

    assert "/regenerate answer the last question once more" in obey("/help")
    assert "there is no answer yet" in obey("/show")
    assert "there is no answer yet" in obey("/regenerate")
    assert "temperature=0.2" in obey("/sampling temperature=0.2 top_p=0.5")
    assert page.run("$('top_p').value") == "0.5"
    assert "temperature=0.3" in obey("/temperature 0.3")
    assert "there is no /nothing" in obey("/nothing")
    assert "system: Be brief." in obey("/system Be brief.")
    ask(page, "Who?")
    assert page.run("messagesOf(talk.turns)[0].content") == "Be brief."
    obey("/reset")
    assert page.run("talk.turns.length") == 0


def test_a_key_is_asked_for_and_used(page, engine, template):
    with serving(engine, api_key="secret") as server:
        page.open(server.url + "/")
        page.wait("$('login').open")
        for key in ("wrong", "secret"):
            page.run("$('key').focus()")
            page.type(key)
            page.press(*ENTER)
            page.wait(f"sessionStorage['minitri.key'] === '{key}'")
            page.wait("$('login').open" if key == "wrong" else "modelName === 'tiny'")
        page.run("$('max_tokens').value = 4")
        assert ask(page, "Who?")


def test_texts_are_never_markup(page, server):
    open_page(page, server)
    attack = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='x'</script>"
    page.run(
        f"localStorage['minitri.talks'] = JSON.stringify([{{title: {attack!r}, turns: "
        f"[{{question: {attack!r}, pieces: [['draft', {attack!r}]], cut: {attack!r}}}]}}])"
    )
    page.open(server.url + "/?x")
    page.wait("modelName !== ''")
    ask(page, attack)
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert page.run("document.title") == "minitri"
    assert (
        page.run("[...document.querySelectorAll('.question')].at(-1).textContent") == "You" + attack
    )
    refused = "try { document.body.innerHTML = '<b>x</b>'; false } catch { true }"
    assert page.run(refused)  # trusted types


def test_a_model_without_a_template_gets_plain_questions(tmp_path, server):
    with browsing(tmp_path / "profile") as page:
        open_page(page, server)
        ask(page, "Who?")
        assert page.run("hasTemplate") is False
        assert page.run("talk.turns[0].pieces.length") > 0


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [
        ("desktop", (1100, 760), "light"),
        ("dark", (1100, 760), "dark"),
        ("phone", (390, 780), "light"),
    ],
)
def test_it_fits_desktop_phone_and_dark(page, server, tmp_path, name, size, scheme):
    page.resize(*size)
    page.prefer(scheme)
    open_page(page, server, max_tokens=60)
    page.run("$('document').value = 'She had been forced into prudence in her youth.'; showSize()")
    ask(page, "Who is she, and what has she learned?")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("$('send').getBoundingClientRect().bottom <= innerHeight")
    assert page.run("getComputedStyle(document.documentElement).colorScheme") == scheme
    is_listed = page.run("getComputedStyle($('side')).display") != "none"
    assert is_listed == (name != "phone")
    if name == "phone":
        page.run("$('list').click()")
        assert page.run("getComputedStyle($('side')).display") == "block"
        page.press(*ESCAPE)
    page.run("$('theme').click()")
    assert page.run("document.documentElement.dataset.theme") != scheme
    page.run("$('theme').click()")
    file = tmp_path / f"{name}.png"
    page.shoot(file)
    assert file.stat().st_size > 10_000


def test_the_keyboard_reaches_everything_in_order(page, server):
    open_page(page, server)
    ask(page, "Who?")
    page.run("$('colors').focus()")
    seen = ["colors"]
    for _ in range(24):
        page.press("Tab", 9)
        seen.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    wanted = ["colors", "theme", "new", "Who?", "×", "talk", "Regenerate", "question", "send"]
    places = [seen.index(name) for name in wanted]
    assert places == sorted(places)
    unnamed = (
        "[...document.querySelectorAll('button, input, textarea, nav, dialog, meter')].filter("
    )
    unnamed += "x => !(x.textContent.trim() || x.getAttribute('aria-label') || x.labels?.length"
    unnamed += " || x.getAttribute('aria-labelledby'))).length"
    assert page.run(unnamed) == 0


class Outline(html.parser.HTMLParser):
    """Ids, addresses and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


def test_it_is_one_file_whose_script_finds_what_it_names():
    outline = Outline()
    outline.feed(PAGE)
    assert len(outline.ids) == len({*outline.ids})
    assert {*re.findall(r'\$\("(\w+)"\)', PAGE)} <= {*outline.ids}
    targets = ("aria-controls", "aria-labelledby", "for")
    assert {value for name, value in outline.attributes if name in targets} <= {*outline.ids}
    assert not [name for name, _ in outline.attributes if name == "style" or name.startswith("on")]
    assert not re.findall(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
    assert len(PAGE.encode()) <= 60_000


def test_a_policy_lets_only_its_own_script_and_style_in(server):
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert response.text == PAGE


def test_the_endpoints_are_listed_with_the_schemas_of_their_bodies(server):
    schemas = server.http.get("/docs").json()
    assert schemas == {
        "/v1/completions": completion.TextBody.model_json_schema(),
        "/v1/chat/completions": completion.ChatBody.model_json_schema(),
        "/v1/responses": ResponseBody.model_json_schema(),
    }
    assert all(
        "description" in it for kind in schemas.values() for it in kind["properties"].values()
    )
