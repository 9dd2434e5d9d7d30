"""Settings: how to sample, when to stop, how to speculate. Frozen dataclasses, checked when made.

Every default is written once, in a field here. The text below a field is its help in all programs.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minitri.core.errors import MAX_COUNT, check_unicode
from minitri.core.fields import between, brief, check_fields, one_of, refuse

METHODS = ("auto", "autoregressive", "naive", "retrieval", "triforce")
VERIFICATIONS = ("block", "token")
DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("triton", "flash", "math")  # of attention on a GPU
MAX_ROWS = 8  # requests of a stream that run at the same time by default, if memory allows
MAX_GAMMA = 64
LONGEST_BLOCK = 1 + 2 * MAX_GAMMA  # tokens per row in a pass of decoding: the last, and guesses
AUTO_GAMMA1 = (1, 2, 3, 4)
AUTO_GAMMA2 = (1, 2, 3, 4, 6, 8, 12, 16)
AUTO_DEPTHS = (2, 4)  # AUTO_*: the autotuner's choices where a gamma or a tree's depth is not set
MIN_TEMPERATURE = 1e-6
STRIDE = 64  # a cache's number of slots is a multiple, so that all rows are aligned alike in memory
SLIDE = 32  # tokens by which the window of a drafter's cache may exceed `num_recent_tokens`
MIN_BUDGET, MAX_BUDGET = 256, 4096  # limits of the default retrieval budget, in tokens

Bias = Mapping[int, float] | Sequence[tuple[int, float]]


def pad_to_stride(num_slots: int) -> int:
    """A number of slots, rounded up to a multiple of STRIDE."""
    return -(-num_slots // STRIDE) * STRIDE


def _set_strings(settings: Any, name: str) -> None:
    """Replaces one or more strings in field `name` by a tuple of them. Raises `InputError`."""
    value = getattr(settings, name)
    texts = (value,) if isinstance(value, str) else value
    if not (isinstance(texts, Sequence) and all(isinstance(t, str) and t for t in texts)):
        refuse(settings, name, "it must be strings of at least one character")
    for text in texts:
        check_unicode(text, f"a text of {name}")
    object.__setattr__(settings, name, tuple(texts))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings: filters that turn logits into the next-token distribution, in order.
    Text filters (bias, penalties, grammar, forbidden tokens), temperature, top-k, top-p, min-p."""

    __repr__ = brief

    temperature: float = between(0.0, 0.0, 100)
    """Divides the logits; 0 is greedy decoding, 1 is the model's own distribution."""
    top_k: int = between(0, 0)
    """Keep the K likeliest tokens; 0 is off."""
    top_p: float = between(1.0, 1e-99, 1)
    """Keep the likeliest tokens up to this probability mass; 1 is off."""
    min_p: float = between(0.0, 0.0, 1)
    """Keep tokens at least P times as likely as the likeliest; 0 is off."""
    repetition_penalty: float = between(1.0, 0.01, 100)
    """Divide the positive logits of tokens that occur in prompt or output by this, and multiply the
    negative ones; 1 is off."""
    presence_penalty: float = between(0.0, -2.0, 2)
    """Subtract this from the logits of tokens that occur in the output; 0 is off."""
    frequency_penalty: float = between(0.0, -2.0, 2)
    """Subtract this from a token's logit for each time it occurs in the output; 0 is off."""
    logit_bias: Bias = ()
    """Add a number from -100 to 100 to the logit of a token id, as in 42:-1.5; may be repeated."""
    bad_words: Sequence[str] = ()
    """Never write this word, with or without a space before it, as encoded; may be repeated."""
    min_tokens: int = between(0, 0)
    """No end-of-sequence token before N tokens. A stop string ends a text earlier."""
    grammar: Any = None
    """Make the whole output match a grammar, unless its length cuts it; needs minitri[grammar]."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:  # keys of JSON are strings
            bias = {
                int(token) if str(token).encode().isdigit() else -1: float(number)
                for token, number in dict(self.logit_bias).items()
            }
        except (TypeError, ValueError, OverflowError):
            bias = {-1: 0.0}
        if not all(0 <= t <= MAX_COUNT and abs(number) <= 100 for t, number in bias.items()):
            refuse(self, "logit_bias", "it must map token ids to numbers from -100 to 100")
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))
        _set_strings(self, "bad_words")
        if self.grammar is not None and not hasattr(self.grammar, "kind"):
            refuse(self, "grammar", "it must be a minitri.Grammar")
        if 0 < self.temperature < MIN_TEMPERATURE:
            refuse(self, "temperature", f"it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}")

    @property
    def form(self) -> tuple[int, bool, bool]:
        """Settings fixed in a captured CUDA graph: top-k, and whether top-p and min-p are on."""
        return self.top_k, self.top_p < 1, self.min_p > 0

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Temperature, top-p and the logarithm of min-p, which a CUDA graph reads from a tensor."""
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        return self.temperature, self.top_p, log_min_p


@dataclass(frozen=True)
class GenerationConfig:
    """Length and end of each output, and how a run reads prompts and uses memory."""

    max_new_tokens: int = between(256, 1)
    """Generate at most N tokens per prompt."""
    stop: Sequence[str] = ()
    """End before this string; may be given several times; $'\\n' is a line break in most shells."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    logprobs: int | None = between(None, 0, 20)
    """Report log-probabilities: of each token, and of the K likeliest, 0 to 20 (in JSON)."""
    reserve: int = between(0, 0)
    """Make room in the KV cache for N tokens per text, prompt and output, also for later texts."""
    prefill_chunk: int = between(1024, 1)
    """Read the prompt N tokens at a time; bounds the memory of activations."""
    shared_chunk: int = between(128, 1)
    """Read at most N tokens of a prompt between two decoding steps of other texts."""
    offload: bool = False
    """On a GPU, keep in host memory the KV cache of layers that do not fit; see minitri plan."""
    on_chip: int | None = between(None, 0)
    """With --offload: layers whose KV cache stays on the GPU. Default: as many as fit."""
    cuda_graphs: bool = True
    """On a GPU, capture every phase of decoding once and replay it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.on_chip is not None and not self.offload:
            refuse(self, "on_chip", "it means nothing without offload=True; add that")
        _set_strings(self, "stop")

    def for_run(self, reserve: int) -> "GenerationConfig":
        """A copy without the settings of a single text, with room for `reserve` tokens per text."""
        return replace(
            self, max_new_tokens=1, stop=(), ignore_eos=False, logprobs=None, reserve=reserve
        )


# Names of settings of a single text. All others belong to a run, which many texts may share.
TEXT_FIELDS = (*vars(SamplingParams()), "max_new_tokens", "stop", "ignore_eos", "logprobs")


def parse_tree(tree: str) -> tuple[int, int]:
    """(width, depth) of sequences such as "4x3"; (guesses, 0) of a Sequoia tree such as "16"."""
    width, _, depth = tree.partition("x")
    return int(width or 0), int(depth or 0)


def num_nodes(tree: str) -> int:
    """Number of guesses in a tree: 12 in "4x3", 16 in "16", 0 in an empty one."""
    width, depth = parse_tree(tree)
    return width * (depth or 1)


@dataclass(frozen=True)
class StepPlan:
    """Plan of one decoding step: which stages take part, and how many tokens they guess."""

    method: str  # one of METHODS, but not auto
    gamma1: int = 0  # tokens that the drafter guesses per round; 0 without a drafter
    gamma2: int = 0  # tokens that the retrieval level collects; 0 without that level
    tree: str = ""  # of the lowest stage's guesses, such as "16" or "4x3"; a chain if empty

    def __str__(self) -> str:
        _, *gammas = vars(self).items()
        return " ".join([self.method, *(f"{name} {gamma}" for name, gamma in gammas if gamma)])

    @property
    def proposers(self) -> list[str]:
        """Names of the stages that guess, the lowest first."""
        return ["draft"] * (self.gamma1 > 0) + ["retrieval"] * (self.gamma2 > 0)


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of speculative decoding; the text's distribution does not depend on them."""

    method: str = one_of("auto", *METHODS)
    """Who guesses. auto: the fastest, chosen before every step; autoregressive: nobody; naive: a
    drafter; retrieval: the target with a small part of its KV cache; triforce: a drafter for the
    retrieval level, which guesses for the target."""
    policy: Any = "retrieval"
    """Which tokens the retrieval cache holds: by the paper's rule, or by a `minitri.Policy`."""
    gamma1: int | None = between(None, 1, MAX_GAMMA)
    """Tokens the drafter guesses at a time. Default: chosen before every step."""
    gamma2: int | None = between(None, 1, MAX_GAMMA)
    """Guesses with the retrieval cache before the full one verifies. Default: chosen every step."""
    budget: int | None = between(None, 1, math.inf)
    """Tokens in the retrieval cache, a multiple of the chunk size. Default: a quarter of the
    prompt, from 256 to 4096."""
    chunk_size: int = between(8, 1, 1024)
    """Tokens that are retrieved together."""
    num_sink_tokens: int = between(4, 0)
    """First tokens of the text, kept by every small cache."""
    num_recent_tokens: int = between(252, 1)
    """Latest tokens that small caches keep; at most a quarter of a retrieval cache."""
    observation_window: int = between(16, 1, 1024)
    """Latest tokens whose queries select the chunks of the retrieval cache."""
    rebuild_stride: int = between(256, 1)
    """New tokens after which the retrieval cache is rebuilt."""
    coupled: bool = False
    """Tie random numbers to seed and position: one text per seed for all methods."""
    timed: bool = False
    """Let the autotuner use measured times even where a seed then no longer repeats its text: at a
    temperature above 0 unless coupled, and wherever rounding may change a text (not with float32 or
    compiled kernels on a CPU). Without it predicted costs count there."""
    verification: str = one_of("block", *VERIFICATIONS)
    """Verify a chain of guesses as a block, which accepts more, or token by token; no difference at
    temperature 0 or with --coupled."""
    tree: str = ""
    """Let the lowest stage guess trees: N, a Sequoia tree of at most N tokens, or WxD, W sequences
    of D tokens. Rounding may then decide a near-tie otherwise. Default: chains."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.policy != "retrieval" and not callable(getattr(self.policy, "scores", None)):
            refuse(self, "policy", "it must be retrieval, or a minitri.Policy")
        if self.budget and self.budget % self.chunk_size:
            refuse(self, "budget", f"it must be a multiple of the chunk size, {self.chunk_size}")
        is_tree = re.fullmatch("([1-9][0-9]?(x[1-9][0-9]?)?)?", self.tree)
        if not is_tree or num_nodes(self.tree) > MAX_GAMMA:
            refuse(self, "tree", f"it must be as 16 or 4x3, of 1 to {MAX_GAMMA} tokens")
        depth = parse_tree(self.tree)[1]
        if depth and self.gamma1 not in (None, depth):
            refuse(self, "gamma1", f"but tree={self.tree}; leave one of them out")

    def budget_for(self, num_prompt_tokens: int) -> int:
        """Tokens in the retrieval cache for a prompt of this length."""
        if self.budget:
            return self.budget
        budget = min(max(num_prompt_tokens // 4, MIN_BUDGET), MAX_BUDGET)
        return -(-budget // self.chunk_size) * self.chunk_size

    @property
    def plans(self) -> list[StepPlan]:
        """Combinations of method, gamma1, gamma2 and tree that these settings allow in a step."""
        tree = self.tree
        depth = parse_tree(tree)[1] or None
        gammas1 = _choices(depth or self.gamma1, AUTO_DEPTHS if tree else AUTO_GAMMA1)
        gammas2 = _choices(self.gamma2, AUTO_GAMMA2)
        # The lowest stage guesses trees: the retrieval level only where there is no drafter.
        lowest = tree * (self.method == "retrieval")
        depths = _choices(depth or self.gamma2, AUTO_DEPTHS) if lowest else gammas2
        pairs = itertools.product(gammas1, gammas2)
        plans = {
            "autoregressive": [StepPlan("autoregressive")],
            "naive": [StepPlan("naive", gamma1, 0, tree) for gamma1 in gammas1],
            "retrieval": [StepPlan("retrieval", 0, gamma2, lowest) for gamma2 in depths],
            "triforce": [StepPlan("triforce", *gammas, tree) for gammas in pairs],
        }
        return plans.get(self.method) or [*itertools.chain(*plans.values())]

    @cached_property
    def max_block(self) -> int:
        """Most tokens per row in a pass of the target: the text's last, gamma2 - 1 guesses, and a
        round more: the drafter's gamma1 guesses (or tree), and the retrieval level's own token."""
        return 1 + max(max(p.gamma1, num_nodes(p.tree)) + p.gamma2 for p in self.plans)

    @property
    def small_block(self) -> int:
        """Most tokens per row in a pass of the retrieval level: the text's last, and guesses."""
        return self.max_block if self.tree else 1 + max(plan.gamma1 for plan in self.plans)

    @property
    def room(self) -> int:
        """Slots of a small KV cache beyond window or budget, for unread tokens and guesses."""
        return 2 * self.max_block

    @property
    def window_slots(self) -> int:
        """Slots of a drafter's cache: sinks and recent tokens, with room to slide and to guess."""
        return self.num_sink_tokens + self.num_recent_tokens + SLIDE + self.room


def _choices(gamma: int | None, choices: tuple[int, ...]) -> tuple[int, ...]:
    return (gamma,) if gamma else choices
