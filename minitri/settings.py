"""What a run wants: how to draw, when to stop, how to speculate. Frozen dataclasses, checked when they are made.

Every default is written once, in a field here; the command line reads it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitri.errors import InputError, shorten

METHODS = ("auto", "autoregressive", "naive", "retrieval", "triforce")
POLICIES = ("retrieval", "streaming", "topk", "h2o")
MAX_GAMMA = 64
AUTO_GAMMA1 = (1, 2, 3, 4)
AUTO_GAMMA2 = (1, 2, 3, 4, 6, 8, 12, 16)
"""What is chosen from where a gamma is left open."""
MIN_BUDGET, MAX_BUDGET = 256, 4096
BUDGET_DOUBLINGS = (-2, -1, 0, 1)
"""An open budget begins as a quarter of the prompt, within these limits; it may be halved twice or doubled once, as far
as it stays within them and does not exceed half the prompt."""
MAX_CHUNK_SIZE = 1024


@dataclass(frozen=True)
class SamplingParams:
    """The filters that, with the logits, define a row's next-token law. They apply in this order."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy decoding (the exact one-hot law)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one; 0 keeps all."""

    def __post_init__(self) -> None:
        checks = (
            (
                "temperature",
                self.temperature == 0 or 1e-6 <= self.temperature <= 100,
                "0 (greedy) or from 1e-6 to 100",
            ),
            (
                "top_k",
                isinstance(self.top_k, int) and self.top_k >= 0,
                "0 (off) or a positive number of tokens",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
        )
        for name, ok, wanted in checks:
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {wanted}")

    @property
    def form(self) -> tuple[int, bool, bool]:
        """What the way from logits to a law looks like, but for numbers: top-k, and which filters there are. A greedy
        law has none, so the way of any form leads to it."""
        return self.top_k, self.top_p < 1, self.min_p > 0


def check_unicode(text: str, what: str) -> None:
    """Refuses text with lone surrogates, which is how bytes that are not UTF-8 arrive from a command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode (character {error.start}); give it as UTF-8"
        ) from None


@dataclass(frozen=True)
class GenerationConfig:
    """What a run produces and when it stops."""

    max_new_tokens: int = 256
    """Tokens to generate at most, per prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are cut off, wherever token borders fall."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    prefill_chunk: int = 1024
    """Prompt tokens per forward pass while the prompt is read; bounds the memory of activations."""
    offload: bool = False
    """On a GPU, keep the KV cache of layers for which there is no room in host memory."""
    on_chip: int | None = None
    """With `offload`, the layers whose KV cache stays on the GPU. None: as many as fit."""
    cuda_graphs: bool = True
    """On a GPU, capture every phase of decoding once and replay it."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value}; it must be a whole number of at least 1")
        if self.on_chip is not None and (not isinstance(self.on_chip, int) or self.on_chip < 0):
            raise InputError(
                f"on_chip is {self.on_chip}; it must be 0 or a positive number of layers"
            )
        if self.on_chip is not None and not self.offload:
            raise InputError(
                f"on_chip is {self.on_chip}, which means nothing without offload; add --offload"
            )
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise InputError(
                f"stop is {shorten(repr(self.stop), 60)}; it must be a tuple of strings, such as ('END',)"
            )
        for text in self.stop:
            if not text:
                raise InputError(
                    "a stop string is empty; give at least one character, or leave --stop out"
                )
            check_unicode(text, "a stop string")


@dataclass(frozen=True)
class Plan:
    """How a step is made."""

    method: str
    gamma1: int = 0
    """Tokens the drafter guesses per round; 0 where there is no drafter."""
    gamma2: int = 0
    """Tokens the retrieval level collects; 0 where there is no such level."""

    def __str__(self) -> str:
        gammas = (("gamma1", self.gamma1), ("gamma2", self.gamma2))
        return " ".join([self.method, *(f"{name} {gamma}" for name, gamma in gammas if gamma)])

    @property
    def max_guesses(self) -> int:
        """Longest block that the last level verifies: an inner round begins one short of gamma2 and adds gamma1 + 1."""
        return self.gamma1 + self.gamma2


@dataclass(frozen=True)
class SpeculationConfig:
    """How the cascade is stacked and how far each level runs ahead. Nothing here changes the law of the output."""

    method: str = "auto"
    """`autoregressive` (target alone), `naive` (drafter, target), `retrieval` (retrieval cache, target), `triforce`
    (all three); `auto` takes before every step the one that pays, see `tuning.py`."""
    policy: str = "retrieval"
    """Which of the target's tokens the middle cache holds; see `caches/policies.py`."""
    gamma1: int | None = None
    """Tokens the drafter guesses per round. None: what pays, chosen before every step."""
    gamma2: int | None = None
    """Tokens the retrieval level collects before the full cache verifies them. None: what pays."""
    budget: int | None = None
    """Tokens in the retrieval cache. None: a quarter of the prompt, from 256 to the paper's 4096; where method or
    gammas are open, too, it then follows what pays, see `tuning.py`."""
    chunk_size: int = 8
    """Tokens that are retrieved together."""
    num_sink_tokens: int = 4
    """First tokens, which every small cache keeps."""
    num_recent_tokens: int = 252
    """Latest tokens that the drafter's cache keeps; the retrieval cache keeps up to a quarter of its budget of them."""
    observation_window: int = 16
    """Latest tokens whose queries choose what the retrieval cache holds."""
    rebuild_stride: int = 256
    """New tokens after which the retrieval cache is chosen anew; it always is when half of it has been overwritten."""
    rebuild_threshold: float = 0.0
    """Choose it anew, too, when the moving acceptance rate of its tokens falls below this; 0 is off."""
    coupled: bool = False
    """Seed-coupled sampling: a seed gives the same text whatever the method."""
    timed: bool = False
    """Let choices follow the clock even where a seed then no longer gives the same text twice: at a temperature above
    0, unless coupled, and wherever a text may depend on the last bits, in any dtype but float32 or on a GPU. Otherwise
    they follow nominal costs there."""

    def __post_init__(self) -> None:
        for name, choices in (("method", METHODS), ("policy", POLICIES)):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(choices)}"
                )
        for name in (
            "gamma1",
            "gamma2",
            "chunk_size",
            "num_recent_tokens",
            "observation_window",
            "rebuild_stride",
        ):
            value = getattr(self, name)
            is_open = value is None and name in ("gamma1", "gamma2")
            if not is_open and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value}; it must be a whole number of at least 1")
        if not isinstance(self.num_sink_tokens, int) or self.num_sink_tokens < 0:
            raise InputError(
                f"num_sink_tokens is {self.num_sink_tokens}; it must be 0 or a positive number of tokens"
            )
        if max(self.gamma1 or 1, self.gamma2 or 1) > MAX_GAMMA:
            raise InputError(
                f"gamma1, gamma2 are {self.gamma1 or 'auto'}, {self.gamma2 or 'auto'}; "
                f"guessing more than {MAX_GAMMA} tokens ahead never pays, lower them"
            )
        if self.chunk_size > MAX_CHUNK_SIZE:
            raise InputError(
                f"chunk_size is {self.chunk_size} tokens; at most {MAX_CHUNK_SIZE} make sense, the paper has 8"
            )
        if not 0 <= self.rebuild_threshold <= 1:
            raise InputError(
                f"rebuild_threshold is {self.rebuild_threshold}; it must be between 0 (off) and 1"
            )
        if self.budget is not None and (
            not isinstance(self.budget, int) or self.budget < 1 or self.budget % self.chunk_size
        ):
            raise InputError(
                f"budget is {self.budget} tokens; it must be a multiple of the chunk size, {self.chunk_size}, such as "
                f"{max(1, round((self.budget or 0) / self.chunk_size)) * self.chunk_size}"
            )

    def budget_for(self, num_prompt_tokens: int, doublings: int = 0) -> int:
        """Tokens in the retrieval cache of a prompt of this length; doubled, below 0 halved, as often as it may be."""
        if self.budget is not None:
            return self.budget
        budget = min(max(num_prompt_tokens // 4, MIN_BUDGET), MAX_BUDGET)
        for _ in range(abs(doublings)):
            other = 2 * budget if doublings > 0 else budget // 2
            if MIN_BUDGET <= other <= min(MAX_BUDGET, num_prompt_tokens // 2):
                budget = other
        return -(-budget // self.chunk_size) * self.chunk_size

    def budgets_for(self, prompt_lengths: Sequence[int]) -> list[list[int]]:
        """The budgets of the rows of a batch to choose from, from the smallest up: no row's becomes smaller."""
        doublings = BUDGET_DOUBLINGS if len(self.plans) > 1 else (0,)
        rows = (
            [self.budget_for(length, number) for length in prompt_lengths] for number in doublings
        )
        return list({sum(budgets): budgets for budgets in rows}.values())

    def max_budget_for(self, prompt_lengths: Sequence[int]) -> int:
        """The largest budget that a row of a batch may be given."""
        return max(map(max, self.budgets_for(prompt_lengths)))

    @property
    def plans(self) -> list[Plan]:
        """All ways to make a step that these settings allow."""
        gammas1 = AUTO_GAMMA1 if self.gamma1 is None else (self.gamma1,)
        gammas2 = AUTO_GAMMA2 if self.gamma2 is None else (self.gamma2,)
        plans = {
            "autoregressive": [Plan("autoregressive")],
            "naive": [Plan("naive", gamma1) for gamma1 in gammas1],
            "retrieval": [Plan("retrieval", 0, gamma2) for gamma2 in gammas2],
            "triforce": [
                Plan("triforce", gamma1, gamma2) for gamma1 in gammas1 for gamma2 in gammas2
            ],
        }
        return [
            plan for method in plans if self.method in ("auto", method) for plan in plans[method]
        ]

    @property
    def max_block(self) -> int:
        """Most tokens the target reads at once while decoding: the last certain one and the longest block."""
        return 1 + max(plan.max_guesses for plan in self.plans)

    @property
    def room(self) -> int:
        """Slots a small cache needs behind its certain tokens: a block, and padding beside another row's block."""
        return 2 * self.max_block
