"""The page: what a person sees and does, in a real browser; and what it is made of."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
IS_DONE = "document.querySelectorAll('.answer .tools').length === 1 && !running"
ANSWER = "[...document.querySelectorAll('.answer .text')].at(-1).textContent"
NOTE = "#talk > .note:last-child"
DRAWN = Path(__file__).with_name("drawn.md").read_text("utf-8")


@pytest.fixture
def page():
    """A tab of a fresh browser, the machine's own."""
    driver = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    how = {"executable_path": program, "args": ["--no-sandbox"], "timeout": 60_000}
    with driver.sync_playwright() as play, play.chromium.launch(**how) as browser:
        yield browser.new_page()


def type_line(page, place: str, text: str) -> None:
    page.fill(f"#{place}", text)
    page.press(f"#{place}", "Enter")


def ask(server, page, question: str) -> str:
    type_line(page, "question", question)
    server.wait(lambda: page.evaluate(IS_DONE))
    return page.evaluate(ANSWER)


def open_page(server, page) -> None:
    page.goto(server.url)
    server.wait(lambda: page.evaluate("modelName === 'tiny'"))
    page.evaluate("$('max_tokens').value = 24; $('seed').value = 7")


@pytest.mark.slow
def test_a_person_asks_stops_goes_on_and_deletes(page, server, render):
    """Texts are never markup; with this seed an answer is repeated."""
    question = "<img src=x onerror=\"document.title='hacked'\"> Who?"
    with server.limited(api_key="secret"):
        page.goto(server.url)
        type_line(page, "key", "secret")
        open_page(server, page)
        text = ask(server, page, question)
        assert page.locator("img").count() == 0
        assert ask(server, page, "/regenerate") == text
        page.click("#new")
        with server.held(num_free=20):
            type_line(page, "question", "Who?")
            server.wait(lambda: page.evaluate("talk.turns[0]?.pieces.length > 0"))
            page.keyboard.press("Escape")
            server.wait(lambda: page.evaluate(IS_DONE))
        begun = page.evaluate(ANSWER)
        assert page.evaluate("talk.turns[0].cut") == "stopped"
        assert len(ask(server, page, "/continue").removeprefix(begun)) > 0
        open_page(server, page)
        titles = page.locator("#saved li button:first-child")
        assert titles.count() == 2
        titles.nth(1).click()
        assert page.evaluate(ANSWER) == text
        page.click("[aria-label='Delete: Who?']")
        assert titles.count() == 1


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_is_one_file_whose_policy_lets_only_its_own_script_and_style_in(server, path):
    response = server.http.get(path)
    page = response.text
    markup = re.sub(r"<(script|style)>.*?</\1", "", page, flags=re.DOTALL)
    ids = re.findall(r'\bid="(\w+)"', markup)
    assert {*re.findall(r'\$\("(\w+)"\)', page)} <= {*ids}
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", markup)
    assert not re.findall(r"[\"'`]https?://\w|(inner|Adjacent)HTML|document\.write|eval\(", page)
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.slow
def test_answers_are_drawn_as_markdown_but_never_as_html(page, scripted, run):
    """Streamed, or kept by the browser; colors show the text itself."""
    run.texts.append(DRAWN)
    open_page(scripted, page)
    page.evaluate("$('max_tokens').value = 999")
    assert ask(scripted, page, "How?") == DRAWN
    wanted = {"h1": ["Ships"], "strong": ["two", "T", "all"], "em": ["not"], "td": ["1", "2"]}
    wanted["code"] = ["sails", "<script>document.title = 'hacked'</script>", "x ~~ y"]
    wanted |= {"img": [], "s": [], ".equation": ["y = x_1", "y", "- z"]}
    for _ in range(2):
        for tag, texts in wanted.items():
            assert page.locator(f".drawn {tag}").all_text_contents() == texts
        assert "my_big_ship, not one<&lt;; 2*3*4, __init__ and " in page.text_content(".drawn p")
        links = page.locator(".drawn a").evaluate_all("all => all.map((a) => a.href)")
        names = ("my_big_ship", "boat_(ship)", "boat_(row)")
        assert links == ["http://127.0.0.1/p.png", *(f"https://a.example/{it}" for it in names)]
        page.reload()
    page.click("#colors")
    visible = [page.locator(f".answer .{view}").is_visible() for view in ("text", "drawn")]
    assert (visible, page.title()) == ([True, False], "minitri")


@pytest.mark.slow
def test_a_document_too_long_is_cut_by_one_press(page, scripted, run):
    """Before it is sent, and if the server refuses it. Its beginning takes most of its tokens."""
    text = "4 7 1 2 " * 2000 + "She had been forced into prudence. " * 500
    open_page(scripted, page)
    for line, advice in (("/docments", "did you mean /documents?"), ("/top_p 9", "a number from")):
        type_line(page, "question", line)
        assert advice in page.locator(NOTE).text_content()
    for number, event in enumerate(("change", "nobody counts")):
        page.evaluate("text => { $('document').value = text }", text)
        page.dispatch_event("#document", event)
        type_line(page, "question", "Who?")
        scripted.wait(lambda: page.locator(f"{NOTE} button").is_visible())
        assert page.evaluate("talk.turns.length") == 2 * number
        run.requests.clear()
        page.click(f"{NOTE} button")
        scripted.wait(lambda: run.requests and page.evaluate(IS_DONE))
        assert (2800 < len(run.prompt) < 3200, page.is_visible("#document")) == (True, False)


@pytest.mark.slow
def test_the_commands_of_the_docs_work_when_pasted(page, scripted, run):
    page.goto(f"{scripted.url}/docs")
    scripted.wait(lambda: page.locator("pre").count() == 8)
    for command in page.locator("pre").all_text_contents():
        done = subprocess.run(["bash", "-c", f"{command} -sSf"], capture_output=True, text=True)
        assert (done.returncode, done.stderr, bool(done.stdout)) == (0, "", True), command
