"""The simulation of a fleet, against closed forms and what must hold for any."""

import json
import math

import pytest

from minitri import InputError, plan
from minitri.cluster import simulation
from minitri.cluster.simulation import Arrival, Load, drawn, measured, read_load, simulate

FAST = measured("0.1:10:1:2")
"""100 us for a token of a prompt, 2 ms for a chunk, 10 ms for a step, 1 for a further row."""


def answered(load: Load, num: int = 1, costs=FAST, asked=None):
    asked = asked or drawn(load)
    return asked, simulate(load, asked, num, costs)


def test_one_request_takes_its_chunks_and_its_steps():
    """By hand: 2,499 tokens in chunks of 1,024, a pass for the first token, 19 steps; the router
    has it for 1 ms."""
    [it], found = answered(Load(), asked=[Arrival(5.0, 2500, 20)])
    assert it.first - it.at == pytest.approx(0.001 + 3 * 0.002 + 0.2499 + 0.010)
    assert it.end - it.first == pytest.approx(19 * 0.010)
    assert found["busy"] == pytest.approx(1 - 0.001 / (it.end - it.at))


def test_a_long_prompt_is_read_in_small_chunks_next_to_others():
    """Each of 128 tokens delays the answer that goes on by a chunk, and a step is over two rows
    once the second has begun."""
    first, second = Arrival(0.0, 2, 200), Arrival(0.05, 1281, 2)
    answered(Load(router=0.0), asked=[first, second])
    rounds = 10 * (0.002 + 0.0128 + 0.010)
    assert 0 <= second.first - second.at - rounds - 0.0 <= 0.010 + 1e-9
    alone = 0.0021 + 200 * 0.010
    assert first.end == pytest.approx(alone + 10 * (0.002 + 0.0128) + 0.010 + 0.001)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_one_row_waits_as_a_queue_of_equal_services(rho):
    """M/D/1: rho / (2 (1 - rho)) services on average. Of 20,000 requests the mean waiting time has
    a standard deviation of some percent: five of them are allowed."""
    service = 0.100
    load = Load(rate=rho / service, prompt=2, output=10, rows=1, requests=20_000, router=0.0)
    asked, found = answered(load, costs=measured("0:10:0:0"))
    waits = [it.end - it.at - service for it in asked]
    expected = rho / (2 * (1 - rho)) * service
    assert sum(waits) / len(waits) == pytest.approx(
        expected, rel={0.3: 0.08, 0.6: 0.1}.get(rho, 0.2)
    )
    assert found["busy"] == pytest.approx(rho, rel=0.03)


@pytest.mark.parametrize("mtbf", [1e9, 0.01])
def test_each_request_is_answered_once(mtbf):
    load = Load(rate=8.0, prompt=600, output=30, shared=0.5, requests=500, mtbf=mtbf, restart=5.0)
    asked, found = answered(load, 3)
    assert all(it.at < it.first <= it.end < math.inf for it in asked)
    assert all(it.num_unread == it.num_unwritten == 0 for it in asked)
    assert found["tokens/s"] == pytest.approx(30 * found["requests/s"])
    assert 0 < found["busy"] <= 1


def test_failures_cost_time():
    load = Load(rate=8.0, prompt=600, output=30, requests=500, restart=5.0)
    _, sound = answered(load, 3)
    _, failing = answered(simulation.replace(load, mtbf=0.01), 3)
    assert failing["answer p95"] > 1.5 * sound["answer p95"]


def test_more_replicas_never_lower_the_throughput():
    load = Load(rate=30.0, prompt=600, output=30, shared=0.7, requests=600)
    found = [answered(load, num)[1]["requests/s"] for num in (1, 2, 3, 4, 6, 8)]
    assert found == sorted(found)
    assert found[1] > 1.8 * found[0]


def test_a_document_is_read_once_where_there_is_room_for_all():
    load = Load(rate=0.1, prompt=1000, shared=0.8, documents=4, requests=200)
    asked, found = answered(load)
    read = [it for it in asked if it.num_cached == 0]
    assert len(read) == len({it.document for it in read}) == 4
    assert found["hits"] == pytest.approx(0.8 * 196 / 200)
    assert answered(simulation.replace(load, documents=40))[1]["hits"] < 0.5 * found["hits"]


def test_requests_go_where_their_document_is_unless_too_much_waits_there():
    load = Load(rate=0.2, prompt=4000, output=20, shared=0.9, documents=3, requests=100)
    asked, _ = answered(load, 3)
    homes = {
        document: {it.replica for it in asked if it.document == document} for document in "012"
    }
    assert sum(map(len, homes.values())) <= 4
    asked, _ = answered(simulation.replace(load, rate=20.0, documents=1), 3)
    assert {it.replica for it in asked} == {0, 1, 2}


def test_a_file_is_a_load(tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [{"at": 0.5 * i, "prompt_tokens": 100 + i, "max_tokens": 8} for i in range(20)]
    lines += [{"at": 10.0, "prompt": "a book " * 400}, {"at": 10.0, "prompt": "a book " * 401}]
    file.write_text("\n".join(map(json.dumps, lines)))
    load, asked = read_load(f"{file},shared=0.5,output=7")
    assert [it.at for it in asked] == [line["at"] for line in lines]
    assert [it.num_new for it in asked] == [8] * 20 + [7] * 2
    assert asked[-1].num_shared == 351
    assert asked[-1].document == asked[-2].document
    assert (load.requests, load.rate, load.output) == (22, 2.2, 7)


def test_the_plan_names_the_least_number_that_is_enough(call, monkeypatch):
    """In a table, and as JSON; the same with step times that are given."""
    monkeypatch.setattr(simulation, "EACH", 1)
    flags = ("--fleet", "rate=9,prompt=3000,output=20,requests=100", "--latency", "1")
    done = call(plan.main, *flags, "--model", "llama3.2-1b", "--gpu", "l4")
    assert done.code == 0
    found = call(plan.main, *flags, "--step-ms", "0.1:10:1:2", "--json").json
    rows = {row["replicas"]: row for row in found["tried"]}
    least = found["least"]
    assert rows[least]["first p95"] <= 1
    assert rows[least - 1]["first p95"] > 1
    assert [row["replicas"] for row in found["scaled"]] == sorted({least, 10, 100, 1000})
    assert found["router_limit"] == pytest.approx(1000 * least / 9)


def test_a_fleet_whose_queue_grows_is_not_enough(call):
    """However short the run, and where a number is given."""
    step_ms = ("--step-ms", "0.1:10:1:2", "--json", "--fleet", "rate=400,prompt=900,output=10")
    found = call(plan.main, *step_ms, "--latency", "30", "--replicas", "8").json
    assert found["tried"][0]["first p95"] < 30
    assert (found["least"], found["enough"]) == (8, False)


def test_no_more_is_known_of_a_short_prompt_than_all_but_its_last_token(tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [{"at": 100 + 5 * i, "prompt_tokens": 100, "document": "d"} for i in range(1, 5)]
    lines = [{"at": 100, "prompt_tokens": 4000, "document": "d"}, *lines, {"at": 200, "prompt": ""}]
    file.write_text("\n".join(map(json.dumps, lines)))
    load, asked = read_load(f"{file},shared=1")
    assert [it.at for it in asked][:2] == [0, 5]
    answered(load, costs=measured("5:1:0:0"), asked=asked)
    assert [it.num_cached for it in asked] == [0, 99, 99, 99, 99, 0]
    assert all(it.at < it.first <= it.end for it in asked)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("rate=0",), "rate is 0; it must be a number from 1e-06"),
        (("rate=2,prompts=9",), "prompts is not a setting; did you mean prompt"),
        (("rate",), "--fleet rate cannot be read"),
        (("rate=2=3",), "--fleet is rate=2=3"),
        (("rate=2", "--step-ms", "1:2"), "--step-ms is 1:2 .*; give four numbers"),
        (("rate=2", "--step-ms", "1:2:3:-4"), "--step-ms is 1:2:3:-4 .*; give four numbers"),
        (("rate=2", "--latency", "nan"), "--latency is nan; give seconds"),
        (("requests=20", "--latency", "0.001"), "latency 0.001 is less than .*; raise it"),
    ],
)
def test_a_load_that_makes_no_sense_is_a_line(call, flags, problem):
    step_ms = () if "--step-ms" in flags else ("--step-ms", "0.1:10:1:2")
    done = call(plan.main, "--fleet", *flags, *step_ms)
    assert done.code == 2
    with pytest.raises(InputError, match=problem):
        raise InputError(done.err)
