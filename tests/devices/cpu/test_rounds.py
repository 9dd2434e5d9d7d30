"""Passes in one call of the kernels, from tokens to verdicts, have the bits of their parts."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from minitri import SamplingParams
from minitri.core.model.block import pack_block
from minitri.core.runner import ModelRunner
from minitri.devices.choose import drafter_in_few_bits, use_kernels
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.rounds import rounds_of
from tests.conftest import tiny_model
from tests.core.rigs import GREEDY, Rig, random_prompt, tiny_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, context_length=512)
PROMPTS = [random_prompt(CONFIG, length, seed=length) for length in (1, 9, 150)]
WINDOW = {"num_sink_tokens": 3, "num_recent_tokens": 12}
FILTERED = SamplingParams(1.0, 20, top_p=0.9, min_p=0.02)


def models_of(kind: str, dtype: torch.dtype):
    """A target and its drafter, on kernels; vocabulary, head and embeddings may be others."""
    config = replace(CONFIG, tie_word_embeddings="tied" in kind)
    target = tiny_model(config, dtype=dtype)
    size = {"smaller": 50, "larger": 97}.get(kind, config.vocab_size)
    config = replace(config, vocab_size=size)
    if "lent" in kind:
        config = replace(config, draft_of="target", head_size=40, tie_word_embeddings=False)
    lender = target if "lent" in kind else None
    draft = type(target)(config, dtype=dtype, device=target.device, target=lender)
    generator = torch.manual_seed(5)
    for parameter in draft.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    if "lent" in kind:
        draft.lm_head.token_ids.copy_(torch.randperm(size, generator=generator)[:40])
    for model in (target, draft):
        use_kernels(model, load_kernels())
    return target, drafter_in_few_bits(draft.eval(), "auto" if "4 bits" in kind else "same")


def in_parts(rig: Rig) -> None:
    """Makes runners filter, sample and verify by calls of their own, after calls for logits."""
    for runner in rig.runners.values():
        runner.draft = partial(ModelRunner.draft, runner)
        runner.next_probs = lambda *inputs, it=runner: ModelRunner.next_probs(it, *inputs[:3])


def check_rounds(models, sampling=FILTERED, *, prepare=in_parts, **options) -> None:
    """Three rows with filters of their own, of which the middle one ends first, say and hold the
    same by rounds in one call and after `prepare`, to the bit if these are in parts."""
    same = torch.equal if prepare is in_parts else partial(torch.allclose, atol=1e-4)
    settings = {"sampling": sampling, "method": "naive", "num_new": 999, **WINDOW, **options}
    rigs = [Rig(models[0], PROMPTS, draft=models[1], **settings) for _ in range(2)]
    assert all(runner.passes.rounds for runner in rigs[0].runners.values())
    prepare(rigs[1])
    for rig in rigs:
        rig.runners["draft"].sampling[1] = replace(sampling, top_k=7)
        rig.start()
    for number in range(20):
        for rig in rigs if number == 6 else ():
            rig.cascade.retire(1)
        ours, theirs = (rig.step() for rig in rigs)
        caches = [rig.runners["draft"].cache for rig in rigs]
        assert caches[0].lengths == caches[1].lengths
        for b, row in ours.items():
            assert (row.tokens, row.origins) == (theirs[b].tokens, theirs[b].origins)
            assert same(row.logits_NV, theirs[b].logits_NV)
            assert same(row.probs_NV, theirs[b].probs_NV)
            for name in ("raw_keys", "keys", "values"):
                assert same(*(getattr(it, name)[:, b, :, : it.lengths[b]] for it in caches))


@pytest.mark.parametrize(
    ("kind", "dtype", "sampling", "options"),
    [
        ("same", torch.float32, FILTERED, {"gamma1": 1}),
        ("tied", torch.bfloat16, SamplingParams(1.0), {"gamma1": 3}),
        ("4 bits", torch.bfloat16, GREEDY, {"gamma1": 2}),
        ("tied 4 bits", torch.float32, FILTERED, {"gamma1": 3, "verification": "token"}),
        ("lent tied", torch.float16, SamplingParams(0.6, top_p=0.9), {"gamma1": 8}),
        ("smaller", torch.float32, SamplingParams(0.6), {"gamma1": 3}),
        ("larger", torch.float32, FILTERED, {"gamma1": 3, "coupled": True}),
        ("lent", torch.bfloat16, SamplingParams(1.0), {"gamma1": 3, "coupled": True}),
        ("smaller", torch.float32, SamplingParams(1.0), {"gamma1": 3, "coupled": True}),
        ("lent", torch.float32, FILTERED, {"method": "triforce", "gamma2": 4, "budget": 32}),
    ],
)
def test_a_round_has_the_bits_of_its_parts(kind, dtype, sampling, options):
    """After slides of the window, next to rejected guesses."""
    check_rounds(models_of(kind, dtype), sampling, **options)


def without_rounds(rig: Rig) -> None:
    for runner in rig.runners.values():
        runner.passes.rounds = None


@pytest.mark.parametrize("kind", ["same", "lent tied"])
@pytest.mark.parametrize("options", [{"coupled": True}, {"tree": "2x2"}, {"method": "triforce"}])
def test_a_round_computes_what_the_modules_do(kind, options):
    """But for rounding: embeddings, rotations, the last norm and the LM head, also under a mask."""
    options = {"gamma1": 2, "gamma2": 4, "budget": 32, **options}
    if "tree" in options:
        del options["gamma1"]
    check_rounds(models_of(kind, torch.float32), GREEDY, prepare=without_rounds, **options)


def test_the_bits_of_a_token_do_not_depend_on_what_shares_its_pass():
    """Tokens before it in the block, guesses or not, or threads."""
    target, _ = models_of("tied 4 bits", torch.bfloat16)
    text, found = PROMPTS[2][:24], []
    for length, num_guesses, threads in ((1, 0, 1), (7, 0, 3), (19, 0, 2), (20, 4, 1)):
        load_kernels().num_threads = threads
        runner, logits = Rig(target, [text[:1]], method="autoregressive").runners["target"], []
        pieces = [(text[:length], text[length:][:num_guesses])]
        for tokens, guesses in pieces + [([it], []) for it in text[length + num_guesses :]]:
            packed = pack_block(target, [tokens], runner.cache, len(tokens) + len(guesses))
            guesses_BN = torch.tensor([guesses], dtype=torch.int64)
            logits.append(runner.passes.rounds.read(runner, packed, guesses_BN))
            runner.cache.advance([packed.shape[2]])
        found.append(torch.cat(logits, 1)[:, -5:])
    assert all(torch.equal(it, found[0]) for it in found)


def test_what_does_not_fit_is_refused():
    target, draft = models_of("same", torch.float32)
    runner = Rig(target, PROMPTS, draft=draft, method="naive", gamma1=2).runners["draft"]
    rounds, room, cache = runner.passes.rounds, runner.cache.capacity, runner.cache
    packed = pack_block(draft, [[1], [2, 3], [4]], cache, 2)
    numbers_BN = torch.zeros(3, 2, dtype=torch.float64)
    long_3N, turned_BN = torch.zeros(3, room).double(), torch.zeros(2, 3, dtype=torch.float64).t()
    wrong_numbers = (numbers_BN.float(), numbers_BN[:, :0], numbers_BN[:2], long_3N, turned_BN)
    calls = [(rounds.read, packed, torch.zeros(3, 2, dtype=torch.int64))]
    calls += [(rounds.draft, packed, wrong) for wrong in wrong_numbers]
    for wrong in (packed[:3], packed.int(), packed.transpose(1, 2).contiguous().transpose(1, 2)):
        calls.append((rounds.draft, wrong, numbers_BN))
    for call, *wrong in [*calls, (rounds.draft, packed[:, :2], numbers_BN[:2])]:
        with pytest.raises(ValueError, match="the CPU kernels cannot take"):
            call(runner, *wrong)
    keys, values = cache.keys, cache.values
    for pair in (
        (keys[..., :1, :], values[..., :1, :]),
        (keys, values[..., :8, :]),
        (keys, values.bfloat16()),
        (keys[:1], values[:1]),
        (keys[:, :1], values[:, :1]),
    ):
        cache.keys, cache.values = pair
        with pytest.raises(ValueError, match="the CPU kernels cannot take"):
            rounds.draft(runner, packed, numbers_BN)
    cache.keys, cache.values = keys, values
    packed[:2] = 10**9  # some token, at some position, instead
    rounds.draft(runner, packed, numbers_BN)
    rounds.draft(runner, packed, long_3N[:, 1:].contiguous())  # fits


def test_what_one_call_cannot_do_is_done_by_the_modules():
    """Embeddings of another number type; options of a model that kernels leave to PyTorch."""
    target, draft = models_of("lent", torch.float32)
    assert rounds_of(draft)
    draft.lent_embedding = tiny_model(CONFIG, dtype=torch.bfloat16).embed
    assert rounds_of(draft) is None
    target.config = replace(CONFIG, logit_divisor=2.0)
    assert rounds_of(target) is None
