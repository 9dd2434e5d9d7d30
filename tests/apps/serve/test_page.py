"""The page: what a person sees and does, in a real browser; and what it is made of."""

import base64
import hashlib
import re

import pytest

from tests.apps.serve.chromium import browsing

IS_DONE = "document.querySelectorAll('.answer .tools').length === 1 && !running"
ANSWER = "[...document.querySelectorAll('.answer .text')].at(-1).textContent"


def ask(page, question: str) -> str:
    """The answer to a typed question."""
    page.type_line("question", question)
    page.wait(IS_DONE)
    return page.run(ANSWER)


def open_page(page, url: str) -> None:
    page.open(url)
    page.wait("modelName === 'tiny'")
    page.run("$('max_tokens').value = 24; $('seed').value = 7")


@pytest.mark.slow
def test_a_person_asks_stops_goes_on_and_deletes(tmp_path, server, template):
    """Texts are never markup, and numbers and colors are those of the answer."""
    question = "<img src=x onerror=\"document.title='hacked'\"> Who?"
    fields = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "seed": 7}
    wanted = server.post("/v1/chat/completions", **fields, temperature=0.7, top_p=0.9).json()
    usage = wanted["usage"]
    with browsing(tmp_path) as page, server.limited(api_key="secret"):
        page.open(server.url + "/")
        page.wait("$('login').open")
        page.type_line("key", "secret")
        open_page(page, server.url + "/?key")
        text = ask(page, question)
        assert text == wanted["choices"][0]["message"]["content"]
        assert page.run("document.querySelectorAll('img').length") == 0
        origins = page.run("[...document.querySelectorAll('.text span')].map(x => x.className)")
        assert {*origins} <= {"draft", "retrieval", "recovered", "bonus"}
        assert page.run("$('used').textContent") == str(usage["total_tokens"])
        share = usage["completion_tokens_details"]["accepted_prediction_tokens"] / 24
        assert page.run("$('accepted').textContent") == f"{round(100 * share)} %"
        assert ask(page, "/regenerate") == text  # with this seed
        page.type_line("question", "/sampling top_p=0.5")
        assert page.run("$('top_p').value") == "0.5"
        page.run("$('new').click()")
        with server.held(num_free=20):
            page.type_line("question", "Who?")
            page.wait("talk.turns[0]?.pieces.length > 0")
            page.press("Escape", 27)
            page.wait(IS_DONE)
        begun = page.run(ANSWER)
        assert page.run("talk.turns[0].cut") == "stopped"
        assert len(ask(page, "/continue").removeprefix(begun)) > 0
        open_page(page, server.url + "/?again")
        titles = "[...document.querySelectorAll('#saved li button:first-child')]"
        assert page.run(f"{titles}.length") == 2
        page.run(f"{titles}[1].click()")
        assert page.run(ANSWER) == text
        page.run("document.querySelector('[aria-label=\"Delete: Who?\"]').click()")
        assert page.run(f"{titles}.length") == 1


def test_the_page_is_one_file_whose_policy_lets_only_its_own_script_and_style_in(server):
    response = server.http.get("/")
    page = response.text
    markup = re.sub("<(script|style)>.*?</", "", page, flags=re.DOTALL)
    ids = re.findall(r'\bid="(\w+)"', markup)
    named = re.findall(r'\s(?:aria-controls|aria-labelledby|for)="(\w+)"', markup)
    assert len(ids) == len({*ids}) > 20
    assert {*named, *re.findall(r'\$\("(\w+)"\)', page)} <= {*ids}
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", markup)
    assert not re.findall(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert len(page.encode()) <= 60_000
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
