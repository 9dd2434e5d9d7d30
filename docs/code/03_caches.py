"""Chapter 3: what the three caches hold of a text of 1,000 tokens, and of rejected guesses."""

import torch

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.config import ModelConfig
from minitri.core.model.llama import Llama
from minitri.core.prefill import prefill
from minitri.core.runner import DraftRunner, ModelRunner, Passes
from minitri.core.settings import SamplingParams, SpeculationConfig

CPU, DTYPE, PLAIN = torch.device("cpu"), torch.float64, SamplingParams(1.0)
SETTINGS = SpeculationConfig("triforce", gamma1=2, gamma2=4, budget=64, num_recent_tokens=28)
TEXT = torch.randint(64, (1001,), generator=torch.Generator().manual_seed(1)).tolist()


def tiny(context_length: int) -> Llama:
    """A random model of 2 layers, 4 heads that share 2 heads of K and V, and 64 tokens."""
    model = Llama(ModelConfig(2, 32, 48, 4, 2, 8, 64, context_length), dtype=DTYPE, device=CPU)
    for weight in model.parameters():
        weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


if __name__ == "__main__":
    target, draft = tiny(2048), tiny(128)
    full = FullCache.allocate(target, 1, 1024)
    small = RetrievalCache(full, target, SETTINGS, [64])
    window = StreamingCache(draft, 1, SETTINGS)
    verifier = ModelRunner(Passes(target, full, PLAIN, 64, small.queries_LBTHD))
    drafter = DraftRunner(Passes(draft, window, PLAIN, 64))
    list(prefill(target, TEXT[:1000], full, 0, chunk=128))
    verifier.next_probs([TEXT[:1000]], [True])
    small.commit(0, small.queries_LBTHD[:, 0, :1])
    small.take_committed([True])
    for end in range(4, 1001, 4):  # the drafter reads a few tokens at once
        drafter.prepare([TEXT[:end]], [True])
        drafter.next_probs([TEXT[:end]], [True])
    print("cache            tokens read   slots valid next position           KiB")
    for it in (full, small, window):
        numbers = it.num_tokens[0], it.lengths[0], it.next_positions[0], it.num_bytes // 1024
        print(f"{type(it).__name__:14}" + "".join(f"{number:14}" for number in numbers))
    slots_1S = torch.arange(window.lengths[0])[None]
    raw, keys = (it[:, 0, :, slots_1S[0]].transpose(1, 2) for it in (window.raw_keys, window.keys))
    raw = draft.rope.at(slots_1S).rotate(raw)
    print("the drafter's keys are raw keys, rotated by slot:", torch.allclose(keys, raw))
    before = verifier.next_probs([TEXT], [True]).probs_BNV
    verifier.next_probs([[*TEXT, 7, 8, 9]], [True])  # guesses, all rejected
    verifier.cache.crop([1000])
    full.keys[:, :, :, 1000:] = torch.nan
    after = verifier.next_probs([TEXT], [True]).probs_BNV
    print("rejected guesses change the next distribution:", not torch.allclose(before, after))
