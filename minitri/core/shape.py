"""The memory shape of a run: lengths of its rows and settings, which decide what is allocated."""

from dataclasses import dataclass

from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig, pad_to_stride


@dataclass(frozen=True)
class MemoryShape:
    """Lengths and settings that decide how much memory a run needs."""

    prompt_lengths: tuple[int, ...]  # tokens of the longest prompt of each row
    sampling: SamplingParams  # that captured CUDA graphs apply
    generation: GenerationConfig
    speculation: SpeculationConfig

    @property
    def num_rows(self) -> int:
        return len(self.prompt_lengths)

    @property
    def stages(self) -> set[str]:
        """Names of the stages that guess in at least one plan, of `draft` and `retrieval`."""
        return {stage for plan in self.speculation.plans for stage in plan.proposers}

    @property
    def capacity(self) -> int:
        """Slots of the full cache that a row needs: prompt, output, guesses of the last step."""
        num_tokens = max(self.prompt_lengths) + self.generation.max_new_tokens
        num_tokens = max(num_tokens, self.generation.reserve)
        return pad_to_stride(num_tokens + self.speculation.max_block - 1)

    @property
    def budgets(self) -> list[int]:
        """Tokens that each row of the retrieval cache must have room for."""
        reserve = self.generation.reserve
        return [self.budget_for(max(length, reserve)) for length in self.prompt_lengths]

    def budget_for(self, length: int) -> int:
        """Retrieval budget for a prompt of this length, in tokens: at most what a row can hold."""
        unit = self.speculation.chunk_size
        return min(self.speculation.budget_for(length), -(-self.capacity // unit) * unit)
