"""What a run wants: how to sample, when to stop, how to speculate. Frozen, checked when made.

Every default is written once, in a field here. The command line takes defaults and help texts from
these fields (`cli/arguments.py`): the first sentence below a field is its help text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minitri.errors import (
    AT_LEAST_1,
    InputError,
    check_unicode,
    is_count,
    is_number,
    require,
    require_switches,
    shorten,
)

METHODS = ("auto", "autoregressive", "naive", "retrieval", "triforce")
VERIFICATIONS = ("block", "token")
DRAFTERS = ("engine", "lookup")
MAX_GAMMA = 64
LONGEST_BLOCK = 1 + 2 * MAX_GAMMA
"""Most tokens that a pass of decoding reads per row: the last certain one and all guesses."""
OPEN_GAMMA1 = (1, 2, 3, 4)
OPEN_GAMMA2 = (1, 2, 3, 4, 6, 8, 12, 16)
"""What the autotuner chooses from where a gamma is left open."""
OPEN_DEPTHS = (2, 4)
"""The same where the guesses are trees."""
MAX_LOGPROBS = 20
MIN_BUDGET, MAX_BUDGET = 256, 4096
"""Limits of the default budget, in tokens."""
MAX_CHUNK_SIZE = 1024
MAX_OBSERVATION_WINDOW = 1024


@dataclass(frozen=True)
class SamplingParams:
    """The filters that, with the logits, define the next-token distribution, in this order."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy decoding, 1 is the model's own distribution."""
    top_k: int = 0
    """Keep the K likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this probability mass; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least P times as likely as the likeliest; 0 is off."""

    def __post_init__(self) -> None:
        is_fine = is_number(self.temperature, 0, 0) or is_number(self.temperature, 1e-6, 100)
        require(self, "temperature", is_fine, "0 (greedy) or from 1e-6 to 100")
        require(self, "top_k", is_count(self.top_k, 0), "0 (off) or a positive number of tokens")
        is_fine = is_number(self.top_p, 0, 1) and self.top_p > 0
        require(self, "top_p", is_fine, "above 0 and at most 1 (off)")
        require(self, "min_p", is_number(self.min_p, 0, 1), "between 0 (off) and 1")

    @property
    def form(self) -> tuple[int, bool, bool]:
        """Top-k, and whether there are a top-p and a min-p filter: what a captured step fixes."""
        return self.top_k, self.top_p < 1, self.min_p > 0

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Temperature, top-p and the logarithm of min-p: what a captured step reads."""
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        return self.temperature, self.top_p, log_min_p


@dataclass(frozen=True)
class GenerationConfig:
    """What a run produces and when it stops."""

    max_new_tokens: int = 256
    """Generate at most N tokens per prompt."""
    stop: Sequence[str] = ()
    """End before this text; may be given several times; $'\\n' is a line break in most shells."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    logprobs: int | None = None
    """Give the log-probability of every token, and those of the K likeliest, 0 to 20 (in JSON)."""
    reserve: int = 0
    """Make room in the KV cache for texts of N tokens, prompt and output, for longer runs later."""
    prefill_chunk: int = 1024
    """Read the prompt N tokens at a time; bounds the memory of activations."""
    offload: bool = False
    """On a GPU, keep in host memory the KV cache of layers that do not fit; see minitri.plan."""
    on_chip: int | None = None
    """With --offload: layers whose KV cache stays on the GPU. Default: as many as fit."""
    cuda_graphs: bool = True
    """On a GPU, capture every phase of decoding once and replay it."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prefill_chunk"):
            require(self, name, is_count(getattr(self, name)), AT_LEAST_1)
        require_switches(self, "ignore_eos", "offload", "cuda_graphs")
        is_fine = self.logprobs is None or is_count(self.logprobs, 0, MAX_LOGPROBS)
        require(self, "logprobs", is_fine, f"a number of tokens from 0 to {MAX_LOGPROBS}")
        require(self, "reserve", is_count(self.reserve, 0), "0 or a positive number of tokens")
        is_fine = self.on_chip is None or is_count(self.on_chip, 0)
        require(self, "on_chip", is_fine, "0 or a positive number of layers")
        if self.on_chip is not None and not self.offload:
            raise InputError(
                f"on_chip is {self.on_chip}, which means nothing without offload; add --offload"
            )
        is_fine = isinstance(self.stop, Sequence) and all(isinstance(s, str) for s in self.stop)
        require(self, "stop", is_fine, "a sequence of strings, such as ('END',)")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        for text in stops:
            if not text:
                raise InputError(
                    "a stop string is empty; give at least one character, or leave --stop out"
                )
            check_unicode(text, "a stop string")


def num_nodes(tree: str) -> int:
    """Tokens in a tree of this shape: 12 in 4x3, 16 in 16, 0 in an empty one; -1 of nonsense."""
    width, by, depth = tree.partition("x")
    is_shape = width.isdecimal() and (depth.isdecimal() or not by) and len(tree) < 9
    return int(width) * int(depth or 1) or -1 if is_shape else -bool(tree)


@dataclass(frozen=True)
class StepPlan:
    """How one step of decoding is made: which stages take part, and how far they guess ahead."""

    method: str
    gamma1: int = 0
    """Tokens the drafter guesses per round; 0 where there is no drafter."""
    gamma2: int = 0
    """Tokens the retrieval level collects; 0 where there is no such level."""
    tree: str = ""
    """Shape of what the lowest stage guesses, as in `SpeculationConfig`; a chain if empty."""

    def __str__(self) -> str:
        gammas = (("gamma1", self.gamma1), ("gamma2", self.gamma2), ("tree", self.tree))
        return " ".join([self.method, *(f"{name} {gamma}" for name, gamma in gammas if gamma)])

    @property
    def uses_drafter(self) -> bool:
        return self.gamma1 > 0

    @property
    def uses_retrieval(self) -> bool:
        return self.gamma2 > 0

    @property
    def max_guesses(self) -> int:
        """Most guesses that a level reads at once: gamma2 - 1 tokens and a whole inner round."""
        return max(self.gamma1, num_nodes(self.tree)) + self.gamma2


@dataclass(frozen=True)
class SpeculationConfig:
    """How the cascade is stacked and how far each level guesses ahead. The text stays the same."""

    method: str = "auto"
    """Who guesses. auto: whatever is fastest, chosen before every step; autoregressive: nobody;
    naive: a drafter; retrieval: the target with a small part of its KV cache; triforce: the drafter
    guesses for that one."""
    policy: Any = "retrieval"
    """What the retrieval cache holds: by the paper's rule, or by an object of yours, see
    `minitri.Policy`."""
    gamma1: int | None = None
    """Tokens the drafter guesses at a time. Default: chosen before every step."""
    gamma2: int | None = None
    """Tokens guessed with the retrieval cache before the full cache verifies them. Default: chosen
    before every step."""
    budget: int | None = None
    """Tokens in the retrieval cache, a multiple of the chunk size. Default: a quarter of the
    prompt, from 256 to 4096."""
    chunk_size: int = 8
    """Tokens that are retrieved together."""
    num_sink_tokens: int = 4
    """First tokens of the text, which every small cache keeps."""
    num_recent_tokens: int = 252
    """Latest tokens that the drafter's cache keeps; at most a quarter of a retrieval cache."""
    observation_window: int = 16
    """Latest tokens whose queries select what the retrieval cache holds."""
    rebuild_stride: int = 256
    """New tokens after which the retrieval cache is rebuilt."""
    rebuild_threshold: float = 0.0
    """Rebuild the retrieval cache, too, when its acceptance rate falls below this; 0 is off."""
    coupled: bool = False
    """Tie random numbers to seed and position: one text per seed for all methods."""
    timed: bool = False
    """Let the autotuner follow the clock even where a seed then no longer repeats its text: at a
    temperature above 0, unless coupled, and wherever a text may depend on the last bits (any dtype
    but float32, any GPU). Otherwise it follows predicted costs there."""
    verification: str = "block"
    """Test a chain of guesses as a block, which accepts more of them, or token by token; no
    difference at temperature 0 or with --coupled."""
    tree: str = ""
    """Let the lowest stage guess trees: N, a Sequoia tree of at most N tokens, or WxD, W sequences
    of D tokens. In bfloat16 a near-tie may then fall the other way. Default: chains."""

    drafter: str = "engine"
    """Who drafts: the drafter that the engine has, or lookup in the text in its place."""

    def __post_init__(self) -> None:
        choices_of = {"method": METHODS, "verification": VERIFICATIONS, "drafter": DRAFTERS}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(choices)}"
                )
        is_policy = self.policy == "retrieval" or callable(getattr(self.policy, "scores", None))
        wanted = "retrieval, or an object with the methods of minitri.Policy"
        require(self, "policy", is_policy, wanted)
        for name in (
            "gamma1", "gamma2", "chunk_size", "num_recent_tokens", "observation_window",
            "rebuild_stride",
        ):  # fmt: skip
            value = getattr(self, name)
            is_open = value is None and name in ("gamma1", "gamma2")
            require(self, name, is_open or is_count(value), AT_LEAST_1)
        require_switches(self, "coupled", "timed")
        is_tree = isinstance(self.tree, str) and 0 <= num_nodes(self.tree) <= MAX_GAMMA
        wanted = f"tokens, as in 16, or sequences x tokens, as in 4x3; 1 to {MAX_GAMMA} in all"
        require(self, "tree", is_tree, wanted)
        if "x" in self.tree and self.gamma1 not in (None, int(self.tree.partition("x")[2])):
            problem = f"gamma1 is {self.gamma1}, but sequences of {self.tree} are not so long"
            raise InputError(f"{problem}; leave one of them out")
        self._check_sizes()

    def _check_sizes(self) -> None:
        has_sinks = is_count(self.num_sink_tokens, 0)
        require(self, "num_sink_tokens", has_sinks, "0 or a positive number of tokens")
        is_rate = is_number(self.rebuild_threshold, 0, 1)
        require(self, "rebuild_threshold", is_rate, "between 0 (off) and 1")
        is_fine = self.observation_window <= MAX_OBSERVATION_WINDOW
        require(self, "observation_window", is_fine, f"at most {MAX_OBSERVATION_WINDOW} tokens")
        if max(self.gamma1 or 1, self.gamma2 or 1) > MAX_GAMMA:
            raise InputError(
                f"gamma1, gamma2 are {self.gamma1 or 'auto'}, {self.gamma2 or 'auto'}; "
                f"guessing more than {MAX_GAMMA} tokens ahead never pays, lower them"
            )
        if self.chunk_size > MAX_CHUNK_SIZE:
            raise InputError(
                f"chunk_size is {self.chunk_size} tokens; at most {MAX_CHUNK_SIZE} make sense, "
                "the paper has 8"
            )
        budget, chunk = self.budget, self.chunk_size
        if budget is not None and (not is_count(budget, 1, math.inf) or budget % chunk):
            near = max(1, round(budget / chunk)) * chunk if is_count(budget) else 128 * chunk
            raise InputError(
                f"budget is {shorten(repr(budget), 60)} tokens; it must be a multiple of the chunk "
                f"size, {chunk}, such as {near}"
            )

    def budget_for(self, num_prompt_tokens: int) -> int:
        """Tokens in the retrieval cache of a prompt of this length."""
        if self.budget is not None:
            return self.budget
        budget = min(max(num_prompt_tokens // 4, MIN_BUDGET), MAX_BUDGET)
        return -(-budget // self.chunk_size) * self.chunk_size

    @property
    def plans(self) -> list[StepPlan]:
        """All ways to make a step that these settings allow."""
        gammas1 = OPEN_GAMMA1 if self.gamma1 is None else (self.gamma1,)
        gammas2 = OPEN_GAMMA2 if self.gamma2 is None else (self.gamma2,)
        plans = {
            "autoregressive": [StepPlan("autoregressive")],
            "naive": [StepPlan("naive", gamma1) for gamma1 in gammas1],
            "retrieval": [StepPlan("retrieval", 0, gamma2) for gamma2 in gammas2],
            "triforce": [StepPlan("triforce", g1, g2) for g1 in gammas1 for g2 in gammas2],
        }
        chosen = [*plans] if self.method == "auto" else [self.method]
        found = [plan for name in chosen for plan in plans[name]]
        trees = [plan for name in chosen for plan in self._trees(name, gammas2)]
        return [*found, *trees] if self.method == "auto" else trees or found

    def _trees(self, method: str, gammas2: Sequence[int]) -> list[StepPlan]:
        """The plans of a method with trees; gamma1 is their depth, gamma2 where there is none."""
        width, by, depth = self.tree.partition("x")
        gamma = self.gamma2 if method == "retrieval" else self.gamma1
        depths = (int(depth),) if by else OPEN_DEPTHS if gamma is None else (gamma,)
        is_open = self.method == "auto" and num_nodes(width) >= 4 and not by
        sizes = {self.tree, str(num_nodes(width) // 2)} if is_open else {self.tree}
        shapes = [(depth, size) for depth in depths for size in sorted(sizes)] if self.tree else []
        if method == "triforce":
            return [StepPlan(method, depth, g2, size) for depth, size in shapes for g2 in gammas2]
        if method == "naive":
            return [StepPlan(method, depth, 0, size) for depth, size in shapes]
        is_alone = method == "retrieval" and self.method == method  # too sure of itself for trees
        return [StepPlan(method, 0, depth, size) for depth, size in shapes] if is_alone else []

    @property
    def max_block(self) -> int:
        """Most tokens the target reads at once in a step: the last certain one and all guesses."""
        return 1 + max(plan.max_guesses for plan in self.plans)

    @property
    def room(self) -> int:
        """Slots a small cache needs behind what a slide leaves: up to a block that a drafter has
        not read yet, and a block of guesses."""
        return 2 * self.max_block
