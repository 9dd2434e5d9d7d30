"""What the shares of a model compute together; ranks are threads, so that mutants are seen."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from minitri.core.errors import InputError
from minitri.core.model.block import read_block
from minitri.core.model.execution import Ranks
from minitri.devices.parallel.group import RankGroup, first_end, leave
from minitri.devices.parallel.ranks import join
from minitri.files import open_models
from minitri.files.named_models import ModelChoice
from tests.conftest import write_hf_folder
from tests.core.rigs import Rig, new_cache, tiny_config
from tests.devices.gpu_twins import conftest as twins

TOKENS = [3, 320, 160, 161, 0, 7]
MULTIPLIERS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.11}
MULTIPLIERS |= {"residual_multiplier": 0.4, "logits_scaling": 3.0}
SHAPES = {
    "biases, a vocabulary of 321": {"vocab_size": 321, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "Granite": {"model_type": "granite", **MULTIPLIERS, "tie_word_embeddings": True},
    "SmolLM3": {"model_type": "smollm3", "num_hidden_layers": 4, "pad_token_id": 0},
    "one KV head each": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
}
SECONDS = 60
lengths_on_the_device = twins.lengths_on_the_device


class ThreadRanks(RankGroup):
    """Rank `rank` of several; what is sent goes through a list that all of them hold."""

    def __init__(self, rank, sent, barrier):
        super().__init__(None, rank, len(sent))
        self._sent, self._barrier = sent, barrier

    def _call(self, collective, *arguments):
        own = arguments[collective is dist.all_gather]
        self._sent[self.rank] = copy.deepcopy(own)
        self._barrier.wait(SECONDS)
        given = [*self._sent]
        self._barrier.wait(SECONDS)
        if collective is dist.all_gather:
            for output, tensor in zip(arguments[0], given, strict=True):
                output.copy_(tensor)
        elif collective is dist.broadcast_object_list:
            own[:] = given[0]
        else:
            stack = torch.stack(given)
            own.copy_(stack.amin(0) if arguments[1:] else stack.sum(0))


def on_ranks(count, work):
    sent, barrier = [None] * count, threading.Barrier(count)

    def run(rank):
        with torch.inference_mode():
            return work(ThreadRanks(rank, sent, barrier))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.usefixtures("lengths_on_the_device")
@pytest.mark.parametrize(("shape", "count"), [*zip(SHAPES, (2, 2, 2, 2, 3), strict=True)])
def test_shares_give_the_logits_of_the_whole(tmp_path, shape, count, monkeypatch):
    folder = write_hf_folder(tmp_path, **SHAPES[shape])
    choice = ModelChoice(str(folder), dtype="float32", device="cpu", draft_weights="same")
    thread = threading.local()
    monkeypatch.setattr(open_models, "join", lambda: thread.ranks)

    def logits(ranks):
        thread.ranks = ranks
        pool = twins.CpuPool() if ranks.count > 1 else None  # passes are replayed on all together
        model, _ = open_models.OpenModel(choice).load_target()
        tokens = [token % model.config.vocab_size for token in TOKENS]
        cache = new_cache(model.config, dtype=torch.float32)
        found = model.logits(read_block(model, [tokens], cache)), model.num_bytes
        how = {"method": "triforce", "gamma1": 2, "gamma2": 3, "budget": 24, "num_new": 6}
        return *found, Rig(twins.as_on_a_gpu(model), twins.PROMPTS, graphs=pool, **how).run()

    whole, num_bytes, text = logits(Ranks())
    for share, share_bytes, share_text in on_ranks(count, logits):
        assert share_text == text
        torch.testing.assert_close(share, whole, rtol=1e-4, atol=1e-4)
        assert share_bytes < 1.1 * num_bytes / count


def test_norms_over_all_heads_are_not_split():
    with pytest.raises(InputError, match="norms over all heads; use one GPU"):
        tiny_config(joint_norm=True).share(2)
    assert tiny_config(joint_norm=True).share(1).joint_norm


def test_memory_is_the_least_of_all_ranks_and_an_answer_that_of_rank_0():
    assert on_ranks(3, lambda ranks: ranks.least(5 - ranks.rank)) == [3, 3, 3]
    assert on_ranks(2, lambda ranks: ranks.ask_first(lambda: ranks.rank)) == [0, 0]
    assert float(Ranks().sum(torch.ones(()))) == 1


@pytest.mark.parametrize(("count", "rank"), [("x", "0"), ("2", None), ("2", "y")])
def test_an_environment_that_is_not_torchruns_is_refused(count, rank, monkeypatch):
    for name, value in (("WORLD_SIZE", count), ("RANK", rank), ("MASTER_ADDR", None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun"):
        join()


class Graph:
    """Stands for a captured CUDA graph."""

    reset = Mock()


def test_a_group_hands_on_errors_and_ends_after_its_graphs(monkeypatch):
    """Of one rank, in this process."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    store, graph = dist.HashStore(), Graph()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = RankGroup(store, 0, 1)
    assert group.ask_first(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        group.ask_first(lambda: 1 // 0)
    with pytest.raises(InputError, match="different clocks; start all"):
        group.check_same("clocks", math.nan)  # equals nothing
    leave()
    graph.reset.assert_called_once_with()
    for rank, prints in (("0", True), ("1", False), ("x", True)):  # "x": nobody knows which
        monkeypatch.setenv("RANK", rank)
        assert first_end(5) == (5, prints)
