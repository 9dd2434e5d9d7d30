"""How large a study is: the model, how long its texts are, and how many of them are measured."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """Sizes that all items share; each derives its own from them."""

    name: str
    model: str
    """Value of `--model`; empty: a tiny random one, which says nothing of the method."""
    context: int
    """Tokens of most prompts."""
    long_context: int
    """Tokens of the longest prompts."""
    trained_context: int
    """Longer prompts need `rope_scaling`."""
    rope_scaling: str
    budget: int
    new_tokens: int
    num_texts: int
    """Prompts of most items, each another text, or another part of one."""
    num_speed_texts: int
    """Prompts where speed is measured, which takes longer."""
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    dtype: str = "bfloat16"
    gamma1: int = 2
    gamma2: int = 6
    top_p: float = 0.9

    @property
    def contexts(self) -> list[int]:
        """Lengths for figures over length: the longest, and halves of it."""
        return [self.long_context >> n for n in (5, 4, 3, 2, 1, 0)]

    @property
    def budgets(self) -> list[int]:
        """Tokens of the retrieval cache: around the usual one, by powers of 2."""
        return [2 * self.budget >> n for n in (4, 3, 2, 1, 0)]

    @property
    def stretched(self) -> dict[str, Any]:
        """Options of `minitri.load` for texts longer than the model was trained on."""
        return {"rope_scaling": self.rope_scaling} if self.rope_scaling else {}


SCALES = {
    scale.name: scale
    for scale in (
        Scale("tiny", "", 256, 512, 512, "", 64, 24, 2, 1, (0.0, 0.6), "float32"),
        Scale(
            "cpu",
            "smollm2-135m",
            context=7900,
            long_context=32_000,
            trained_context=8192,
            rope_scaling="yarn:4",
            budget=1024,
            new_tokens=192,
            num_texts=3,
            num_speed_texts=2,
        ),
        Scale(
            "gpu",
            "llama2-7b-128k",
            context=122_880,
            long_context=122_880,
            trained_context=131_072,
            rope_scaling="",
            budget=4096,
            new_tokens=256,
            num_texts=100,
            num_speed_texts=10,
        ),
    )
}
