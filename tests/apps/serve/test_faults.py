"""Faults, put in one by one: what each client sees, and that the others and later ones go on.

Others are tested where they arise: memory, drafters and prompts in `tests/engine`, forks in
`tests/test_library.py`, snapshots in `tests/files`.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minitri.core.errors import FaultError
from minitri.worker import NUM_TICKS
from tests.apps.serve.conftest import PROMPT, complete, own_text


def is_well(server, engine) -> bool:
    """Whether another client gets its text, and no other text is left."""
    text = complete(server).choices[0].text
    server.wait_for(num_open=0)
    return text == own_text(engine)


STOPPED = "the run was stopped by"
FAULTS = [
    (FaultError("memory is short", "ask less"), 503, "memory is short; ask less"),
    (RuntimeError("broken"), 500, "a bug: RuntimeError('broken')"),
    (SystemExit(3), 503, f"{STOPPED} SystemExit(3); ask again"),
    (KeyboardInterrupt(), 503, f"{STOPPED} KeyboardInterrupt(); ask again"),
]


@pytest.mark.parametrize(("fault", "status", "seen"), FAULTS)
def test_whatever_the_model_raises_its_requests_fail_and_another_run_is_opened(
    server, engine, caplog, fault, status, seen
):
    faults = [fault]

    def fail():
        if faults:
            raise faults.pop()

    num_runs = len(server.runs)
    with server.hooked(step=fail), ThreadPoolExecutor(3) as clients:
        answers = [*clients.map(lambda _: server.post(prompt="She had"), range(3))]
    failed = [answer for answer in answers if answer.status_code != 200]
    assert (failed[0].status_code, seen in failed[0].json()["error"]["message"]) == (status, True)
    assert ("the run failed" in caplog.text) != isinstance(fault, FaultError)
    assert is_well(server, engine)
    assert len(server.runs) == num_runs + 1  # after that text, which needs it: opened by now


def test_while_no_run_can_be_opened_health_says_so(server, engine):
    def fail():
        raise RuntimeError("broken")

    with server.hooked(step=fail, start=fail):
        assert [server.post(prompt="She had").status_code for _ in range(3)] == [500] * 3
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "RuntimeError('broken')" in health.json()["status"]
    assert is_well(server, engine)
    assert server.http.get("/health").json() == {"status": "ok", "requests": 0}


def test_a_model_that_makes_no_progress_fails_its_requests_until_it_does(server, engine):
    with server.held() as gate, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.post, prompt="She had", stream=s) for s in (True, False)]
        server.wait(lambda: gate.is_reached and server.service.clients.total() == 2)
        for number in range(NUM_TICKS):
            assert server.http.get("/health").status_code == 200, number
            server.service.worker.tick()
        assert all("makes no progress" in it.result().text for it in asked)
        assert [it.result().status_code for it in asked] == [503, 503]
        assert server.post(prompt="She had").status_code == 503
        health = server.http.get("/health")
        assert (health.status_code, "makes no progress" in health.text) == (503, True)
        gate.set()
        server.wait(lambda: server.http.get("/health").status_code == 200)
        assert is_well(server, engine)


def test_a_row_that_fails_is_told_why_and_the_others_have_their_texts(server, engine):
    """A row whose weights are not finite; `tests/engine` has other reasons."""
    asked = [{"prompt": it, "seed": 7, "max_tokens": 24} for it in (PROMPT, "£", PROMPT[:20])]
    alone = [own_text(engine, fields["prompt"]) for fields in asked]
    weights = engine.model.embed_tokens.weight[engine.tokenizer.encode("£")[-1]]
    num_runs = len(server.runs)
    with ThreadPoolExecutor(3) as clients, torch.inference_mode():
        sound = weights.clone()
        weights.fill_(torch.nan)
        try:
            answers = [*clients.map(lambda fields: server.post(**fields), asked)]
            stream = server.post(**asked[1], stream=True)
        finally:
            weights.copy_(sound)
    assert [it.status_code for it in answers] == [200, 503, 200]
    assert all("computed logits that are not finite" in it.text for it in (answers[1], stream))
    answers[1] = server.post(**asked[1])
    assert [it.json()["choices"][0]["text"] for it in answers] == alone
    assert len(server.runs) == num_runs
