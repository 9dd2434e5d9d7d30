"""The table of mutants: bugs that other engines had, or that an earlier test let pass.

The published TriForce code, its tree version and several samplers had the first ones. Each is a
change of a real line, and names the test that notices it; `tests/decoding/test_mutants.py` puts
them in, one by one.
"""

from __future__ import annotations

from tests.mutation import Mutant

DECODING, CACHES = "minitri.decoding.", "minitri.caches."
VERIFY = DECODING + "verification.verify"
BLOCK = DECODING + "verification.verify_block"
NEXT = DECODING + "verification._sample_next"
INDEPENDENT = DECODING + "random_source.IndependentSource._draw"
LEVEL = DECODING + "level.Level."
SAMPLING = DECODING + "sampling."
NOISE = DECODING + "noise."
RUNNER = "minitri.runner."
RETRIEVAL = CACHES + "retrieval.RetrievalCache."
STREAMING = CACHES + "streaming.StreamingCache."

ENUMERATION = "decoding/test_enumeration.py::"
BOTH_LEVELS = ENUMERATION + "test_both_levels_together_give_the_target_distribution"
STOPS = (
    "test_engine.py::test_overlapping_stop_strings_end_a_text_at_the_same_place_however_it_is_cut"
)
BLOCKS = (
    "decoding/test_block_verification.py::test_blocks_at_both_levels_give_the_target_distribution"
)
NUMBERS = "decoding/test_noise.py::"
EQUALITY = "decoding/test_equality.py::"
FILTERS = "decoding/test_sampling.py::"
PLANS = "decoding/test_switching_plans.py::"
CHUNKS = "caches/test_retrieval_cache.py::"
WINDOW = "caches/test_streaming_cache.py::"
AFTER_STEPS = "caches/test_caches_after_steps.py::"
PROBS = "test_runner.py::"
STREAM = "test_stream.py::"
STACK = "minitri.stack.Stack."
OFFLOADED = "minitri.gpu.offload.offloaded_cache.OffloadedFullCache."
LAYERS = "minitri.gpu.offload.layer_major."
RACES = "gpu_twins/test_offloaded_cache.py::"
BY_LAYERS = "gpu_twins/test_layer_major.py::"
PREFIX, PREFIXES = "minitri.caches.prefixes.PrefixCache.", "reuse/test_prefixes.py::"
CLOCK = "gpu_twins/test_device_clock.py::"
TREES = "minitri.trees."
TREE_ENUMERATION = "trees/test_tree_enumeration.py::"
TREE = TREE_ENUMERATION + "test_a_tree_that_the_target_verifies_gives_its_distribution[six-10]"
SPLIT, SHARES = "minitri.parallel.split.", "parallel/test_split.py::"
BIASES = SHARES + "test_shares_give_the_logits_of_the_whole[biases, a vocabulary of 321-2]"
TREE_CACHE = AFTER_STEPS + "test_the_full_cache_equals_a_fresh_prefill_of_the_accepted_tokens"

MUTANTS = [
    Mutant(
        "resample from p-hat",
        NEXT,
        "residual_BV = (scale_B1 * p_BV - q_BV).clamp_min(0)",
        "residual_BV = p_BV",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "bonus token from the wrong row",
        NEXT,
        "p_BV = probs_BNV[rows, num_accepted]",
        "p_BV = probs_BNV[rows, num_accepted.clamp_max(N - 1)]",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "biased acceptance numbers",
        VERIFY,
        "uniforms_BN[:, :N] * q_BN",
        "uniforms_BN[:, :N] ** 1.001 * q_BN",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "q without top-p",
        LEVEL + "propose",
        "probs[b].append(probs_BNV[b, : len(row.tokens)])",
        "probs[b].append(0.8 * probs_BNV[b, : len(row.tokens)] + 0.2 / probs_BNV.shape[2])",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "greedy draft scored with soft q",
        DECODING + "random_source.IndependentSource.sample",
        "sample(probs_BV, uniforms_B1.squeeze(1).to(probs_BV.device, non_blocking=True))",
        "probs_BV.argmax(1)",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "reused noise",
        INDEPENDENT,
        "generator=self._generators[b])",
        "generator=self._generators[b].manual_seed(7))",
        NUMBERS + "test_no_number_of_the_independent_source_serves_twice",
    ),
    Mutant(
        "n numbers drawn instead of n + 1",
        INDEPENDENT,
        "= drawn[:n], drawn[n]",
        "= drawn[:n], drawn[max(n - 1, 0)]",
        NUMBERS + "test_no_number_of_the_independent_source_serves_twice",
    ),
    Mutant(
        "float32 uniforms",
        INDEPENDENT,
        "torch.rand(n + 1, dtype=torch.float64,",
        "torch.rand(n + 1, dtype=torch.float32,",
        NUMBERS + "test_no_number_of_the_independent_source_serves_twice",
    ),
    Mutant(
        "24-bit Gumbel noise",
        NOISE + "hashed_uniforms",
        "(_shift_right(x, 12).double() + 0.5) * 2.0**-52",
        "(_shift_right(x, 40).double() + 0.5) * 2.0**-24",
        NUMBERS + "test_gumbel_noise_is_of_fine_numbers_that_differ",
    ),
    Mutant(
        "noise key of hash(seed + position)",
        NOISE + "noise_key",
        "_splitmix(_splitmix(seed) + position)",
        "_splitmix(seed + position)",
        NUMBERS + "test_no_seed_repeats_the_noise_of_another_at_another_position",
    ),
    Mutant(
        "noise of the wrong sign",
        NOISE + "gumbel",
        "-(-hashed_uniforms",
        "(-hashed_uniforms",
        NUMBERS + "test_coupled_tokens_follow_the_distribution_at_every_position",
    ),
    Mutant(
        "streaming length not reset",
        STREAMING + "empty_row",
        "row._lengths, row._num_tokens = [0], [0]",
        "row._lengths, row._num_tokens = [self._lengths[b]], [0]",
        WINDOW + "test_a_row_that_is_far_behind_is_started_over",
    ),
    Mutant(
        "last accepted token dropped from the drafter",
        RUNNER + "ModelRunner.next_probs",
        "sequence[seen:] if on",
        "sequence[max(seen, len(sequence) - 1) :] if on",
        EQUALITY + "test_a_target_that_drafts_for_itself_is_always_right",
    ),
    Mutant(
        "retrieval tail not refreshed",
        RETRIEVAL + "_copy_committed",
        "in zip((self.keys, self.values), exact, strict=True):",
        "in zip((self.keys, self.values), exact) if start == 0 else ():",
        CHUNKS + "test_committed_tokens_overwrite_the_least_important_slots_first[1]",
    ),
    Mutant(
        "EOS as bonus token ignored",
        "minitri.generation.Generation._emit",
        "text = row.push(token, origin, eos)",
        'text = row.push(token, origin, () if origin == "bonus" else eos)',
        "decoding/test_stops_in_blocks.py::test_end_tokens_end_a_text_at_every_offset_of_a_block",
    ),
    Mutant(
        "acceptance number reused for the recovered token",
        NEXT,
        "sample(residual_BV, uniforms_BN[:, -1])",
        "sample(residual_BV, uniforms_BN[:, N - 1])",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "a drafter's vocabulary cut after the softmax",
        RUNNER + "ModelRunner.output",
        """[..., : self._vocab_size]
        probs_BNV = probs_of_rows(logits_BNV, self._sampling)""",
        """
        probs_BNV = probs_of_rows(logits_BNV, self._sampling)[..., : self._vocab_size]""",
        PROBS
        + "test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_behind_it[sampling0]",
    ),
    Mutant(
        "logits kept in bfloat16 for the softmax",
        "minitri.model.llama.Llama.logits",
        "self.lm_head(hidden).float()",
        "self.lm_head(hidden)",
        PROBS + "test_a_bfloat16_models_distributions_are_float32[sampling0]",
    ),
    Mutant(
        "logits rounded to bfloat16 before the filters",
        RUNNER + "ModelRunner.output",
        "probs_of_rows(logits_BNV, self._sampling)",
        "probs_of_rows(logits_BNV.bfloat16(), self._sampling).float()",
        PROBS
        + "test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_behind_it[sampling0]",
    ),
    Mutant(
        "unrotated queries choose chunks",
        "minitri.model.llama.Attention.mix",
        "latest_BTHD = q_BTHD[:, -shared.queries_LBTHD.shape[2] :]",
        "latest_BTHD = heads[:, -shared.queries_LBTHD.shape[2] :, : self.heads[0]]",
        "caches/test_chunk_scores.py::test_the_queries_that_choose_are_those_that_attend[4]",
    ),
    Mutant(
        "a guess of probability 0 accepted by the number 0",
        VERIFY,
        "* q_BN < p_BN",
        "* q_BN <= p_BN",
        ENUMERATION + "test_a_residual_that_vanishes_falls_back_to_p",
    ),
    Mutant(
        "q of the next guess",
        NEXT,
        "probs_BNV[rows, num_accepted.clamp_max(N - 1)]",
        "probs_BNV[rows, (num_accepted + 1).clamp_max(N - 1)]",
        BOTH_LEVELS + "[3-2-1]",
    ),
    Mutant(
        "a block's recovered token from the residual of single tests",
        NEXT,
        "(scale_B1 * p_BV - q_BV)",
        "(p_BV - q_BV)",
        BLOCKS + "[3-2-1-4]",
    ),
    Mutant(
        "a block tested without the mass of what its rejection leaves",
        BLOCK,
        "(S_BN / (S_BN + 1 - w_BN))",
        "(S_BN * 0 + w_BN)",
        BLOCKS + "[3-2-1-4]",
    ),
    Mutant(
        "what a block's rejection leaves, of the guess before",
        BLOCK,
        "(scales_BN1[:, 1:N] * probs_BNV[:, 1:N]).sub_(proposal.probs_BNV[:, 1:N])",
        "(scales_BN1[:, 1:N] * probs_BNV[:, : N - 1]).sub_(proposal.probs_BNV[:, : N - 1])",
        BLOCKS + "[3-2-1-4]",
    ),
    Mutant(
        "a block's last guess tested as if another followed",
        BLOCK,
        "(num_behind_BN > 0)",
        "(num_behind_BN >= 0)",
        BLOCKS + "[3-1-1-3]",
    ),
    Mutant(
        "a block's chances capped at 1 at the end only",
        BLOCK,
        " - logs_BN.cummax(1).values.clamp_min(0)",
        " - logs_BN.clamp_min(0)",
        BLOCKS + "[3-2-1-4]",
    ),
    Mutant(
        "a block ends at the first test that fails",
        BLOCK,
        "(passes_BN * lengths).amax(1)",
        "passes_BN.cumprod(1).sum(1)",
        BLOCKS + "[3-2-1-4]",
    ),
    Mutant(
        "padding accepted with a block",
        BLOCK,
        " & (num_behind_BN >= 0)",
        "",
        "decoding/test_block_verification.py::"
        "test_a_row_does_not_depend_on_its_neighbours_nor_on_what_pads_it[0.1]",
    ),
    Mutant(
        "accepted guesses counted behind a rejection",
        DECODING + "verification._num_surviving",
        ".cumprod(1).sum(1)",
        ".sum(1)",
        BOTH_LEVELS + "[3-2-1]",
    ),
    Mutant(
        "padding counted as guesses",
        DECODING + "verification._num_surviving",
        "(passes_BN & is_guess_BN)",
        "passes_BN.int()",
        BOTH_LEVELS + "[3-1-1]",
    ),
    Mutant(
        "one generator for all rows",
        INDEPENDENT,
        "generator=self._generators[b])",
        "generator=self._generators[0])",
        EQUALITY + "test_a_row_of_a_batch_gives_what_it_gives_alone_at_any_temperature[24]",
    ),
    Mutant(
        "a row that has ended draws on",
        INDEPENDENT,
        "if active[b]:",
        "if True:",
        EQUALITY + "test_a_row_of_a_batch_gives_what_it_gives_alone_at_any_temperature[24]",
    ),
    Mutant(
        "a short row's last number put behind its guesses",
        INDEPENDENT,
        "uniforms_BN[b, :n], uniforms_BN[b, N] =",
        "uniforms_BN[b, :n], uniforms_BN[b, n] =",
        EQUALITY + "test_a_row_of_a_batch_gives_what_it_gives_alone_at_any_temperature[24]",
    ),
    Mutant(
        "coupled: one noise for a whole block",
        DECODING + "random_source.CoupledSource._keys",
        "noise_key(seed, start + i)",
        "noise_key(seed, start)",
        PLANS + "test_any_schedule_gives_the_text_of_the_model_alone[True-True-schedule3]",
    ),
    Mutant(
        "coupled: noise by the place in the block",
        DECODING + "random_source.CoupledSource._keys",
        "noise_key(seed, start + i)",
        "noise_key(seed, i)",
        PLANS + "test_any_schedule_gives_the_text_of_the_model_alone[True-True-schedule3]",
    ),
    Mutant(
        "top-p drops the token that reaches the mass",
        SAMPLING + "_cutoff_within",
        "probs.cumsum(-1, dtype=torch.float64) - probs",
        "probs.cumsum(-1, dtype=torch.float64)",
        FILTERS
        + "test_every_combination_of_filters_is_the_distribution_by_definition[0.0-0.95-0-0.2]",
    ),
    Mutant(
        "a tree read as a chain by the kernel",
        "minitri.gpu.kernels.flash_decoding.attend_short_block",
        "HAS_RULE=has_rule",
        "HAS_RULE=False",
        "gpu_twins/test_attention_backends.py::"
        "test_a_trees_rule_replaces_causality_inside_the_block[heads0-prefixes0-3-triton 1]",
    ),
    Mutant(
        "all scores of a chunk held at once in float32",
        "minitri.gpu.attention_backends.attend_fused",
        "if H == K or q_BTHD.dtype != torch.float32:",
        "if H >= K:",
        "gpu_twins/test_attention_backends.py::"
        "test_a_chunk_of_a_long_prompt_in_float32_never_holds_all_scores",
    ),
    Mutant(
        "fused kernels write no raw keys",
        "minitri.gpu.fused_modules.FusedAttention.mix",
        "if isinstance(cache, StreamingCache) else None",
        "if cache is None else None",
        "gpu_twins/test_fused_modules.py::test_a_pass_leaves_what_a_plain_one_leaves[2-streaming]",
    ),
    Mutant(
        "fused layers forget the last addition",
        "minitri.gpu.fused_modules.FusedLayers.forward",
        "return x_BTE + change_BTE",
        "return x_BTE",
        "gpu_twins/test_fused_modules.py::test_a_pass_leaves_what_a_plain_one_leaves[2-full]",
    ),
    Mutant(
        "a token of probability 0 sampled at an edge",
        SAMPLING + "sample",
        "right=True",
        "right=False",
        FILTERS + "test_a_token_of_probability_zero_is_never_drawn",
    ),
    Mutant(
        "rejected guesses left in the cache",
        LEVEL + "verify",
        "self.crop([start + n for",
        "self.crop([start + n + 1 for",
        ENUMERATION + "test_nothing_leaks_from_one_step_into_the_next",
    ),
    Mutant(
        "positions of slots, not of tokens",
        "minitri.model.block.make_block",
        "torch.tensor(cache.next_positions)",
        "torch.tensor(cache.lengths)",
        CHUNKS + "test_what_is_read_behind_the_chosen_stands_where_it_does_in_the_text",
    ),
    Mutant(
        "sinks may be dropped",
        RETRIEVAL + "_select",
        "scores_KN[:, :sinks] = scores_KN[:, N - recent :]",
        "scores_KN[:, N - recent :]",
        CHUNKS + "test_a_build_holds_exactly_what_the_policy_chooses[1-retrieval-8-150]",
    ),
    Mutant(
        "a window slides but its keys keep their rotation",
        STREAMING + "slide",
        "rotated_LTKD = self._rope.at(positions).rotate(moved_LTKD)",
        "rotated_LTKD = self._rope.at(positions + 1).rotate(moved_LTKD)",
        WINDOW + "test_a_deep_model_keeps_sinks_and_rotates_keys_by_their_slots",
    ),
    Mutant(
        "a retired row's cache is not emptied",
        DECODING + "cascade.Cascade.retire",
        "stage.reset(b)",
        "stage",
        AFTER_STEPS
        + "test_every_small_cache_knows_only_certain_tokens_after_a_step[autoregressive-None]",
    ),
    Mutant(
        "the first stop string of the list, not of the text",
        "minitri.loading.text_stream.StopScanner.push",
        "min(ends)[1]",
        "ends[0][1]",
        STOPS + "[stop3-xlate-xl]",
    ),
    Mutant(
        "of two stop strings that end together the shorter",
        "minitri.loading.text_stream.StopScanner.push",
        "min(ends)[1]",
        "min(ends, key=lambda end: (end[0], -end[1]))[1]",
        STOPS + "[stop1-xabcd-x]",
    ),
    Mutant(
        "lookup learns guesses",
        "minitri.drafters.lookup._Row.propose",
        "length, guess = self.text.lookup(sequence, gamma)",
        "self.text.extend(sequence[len(self.text.tokens) :])\n"
        "        length, guess = self.text.lookup(sequence, gamma)",
        "drafters/test_lookup.py::test_rejected_guesses_are_never_learnt",
    ),
    Mutant(
        "a row that ends leaves its text to the next",
        "minitri.drafters.lookup.LookupDrafter.reset",
        "self._rows[b] = _Row()",
        "self._rows[b].guess = []",
        "drafters/test_lookup.py::test_a_row_that_ended_is_forgotten",
    ),
    Mutant(
        "text that may begin a stop string is not held back",
        "minitri.loading.text_stream.StopScanner.push",
        "cut = len(text) - keep",
        "cut = len(text)",
        "test_engine.py::test_stop_strings_do_not_care_how_text_is_cut[pieces1]",
    ),
    Mutant(
        "a row that is given to another text goes on with its noise",
        STACK + "admit",
        "self.source.restart(b, seed)",
        "pass",
        STREAM + "test_every_request_gets_what_it_gets_alone[2-naive-False]",
    ),
    Mutant(
        "a row's own seed is not used",
        STACK + "admit",
        "self.source.restart(b, seed)",
        "pass",
        "test_engine.py::test_seeds_decide_and_belong_to_rows",
    ),
    Mutant(
        "a new text is sampled by the old one's filters",
        STACK + "admit",
        "runner.sample_by(request.sampling, b)",
        "pass",
        STREAM + "test_every_request_gets_what_it_gets_alone[2-triforce-False]",
    ),
    Mutant(
        "siblings share the number of their tests",
        TREES + "verification.walk",
        "uniforms[child] * q",
        "uniforms[node + 1] * q",
        TREE,
    ),
    Mutant(
        "a younger sibling tested against p, not the residual",
        TREES + "verification.walk",
        "< float(rest_V[token])",
        "< float(probs_NV[node][token])",
        TREE,
    ),
    Mutant(
        "the token behind a path comes from p, not the residual",
        TREES + "verification.walk",
        "sample_one(rest_V, uniforms[0])",
        "sample_one(probs_NV[node], uniforms[0])",
        TREE,
    ),
    Mutant(
        "a sibling's q still holds the elder ones",
        TREES + "verification.tested_children",
        "q_V[token] = 0",
        "q_V[token] += 0",
        TREE,
    ),
    Mutant(
        "children drawn with replacement",
        TREES + "verification.draw_children",
        "left_V[token] = 0",
        "left_V[token] += 0",
        TREE,
    ),
    Mutant(
        "a tree's tokens numbered by node, not by depth",
        TREES + "reader.TreeRunner.next_probs_of_tree",
        "shape.depths[first : first + T]",
        "range(first, first + T)",
        TREE_CACHE + "[naive tree 3x2-0.02-sampling0-False]",
    ),
    Mutant(
        "a node sees its elder siblings",
        TREES + "shape.TreeShape.rule_TT.func",
        "rule_TT[node] |= rule_TT[parent]",
        "rule_TT[node, :node] = True",
        "trees/test_shape.py::test_a_node_sees_itself_and_its_ancestors",
    ),
    Mutant(
        "a path gathered in the wrong order",
        "minitri.model.cache.gather_path",
        "torch.tensor(path)",
        "torch.tensor(path[::-1])",
        TREE_CACHE + "[naive tree 7-0.02-sampling0-False]",
    ),
    Mutant(
        "a tree's rows of p in the order of its nodes, not of the path",
        TREES + "level.TreeLevel.verify",
        "output.probs_BNV[b, [0, *path]]",
        "output.probs_BNV[b, : 1 + len(path)]",
        TREE_ENUMERATION + "test_a_tree_below_two_levels_gives_the_target_distribution[fork]",
    ),
    Mutant(
        "numbers of a tree's children used again for its tests",
        TREES + "random_source.IndependentTrees._uniforms",
        "generator=self._generators[b]",
        "generator=torch.Generator().manual_seed(b)",
        "trees/test_tree_sampling.py::test_every_child_and_every_test_has_a_number_of_its_own",
    ),
    Mutant(
        "noise of a tree by node, not by position",
        TREES + "random_source.CoupledTrees.walk",
        "start + depth",
        "start + depth + len(depths)",
        "trees/test_trees_in_runs.py::"
        "test_greedy_and_coupled_texts_are_autoregressive_ones[naive-7-sampling2-True]",
    ),
    Mutant(
        "a drafted token fetched by the host",
        LEVEL + "_draft",
        "tokens.append(self._source.sample(probs[-1], positions, active))",
        "tokens.append(torch.tensor(self._source.sample(probs[-1], positions, active).tolist()))",
        "gpu_twins/test_host_round_trips.py::"
        "test_a_step_waits_once_for_every_verdict[triforce-sampling0-how0]",
    ),
    Mutant(
        "guesses read one place too early",
        RUNNER + "ModelRunner.next_probs",
        "block.with_guesses(index_BN[:, 1:],",
        "block.with_guesses(index_BN[:, :-1],",
        EQUALITY + "test_a_target_that_drafts_for_itself_is_always_right",
    ),
    Mutant(
        "guesses behind a distribution that is not finite count again",
        DECODING + "verification._usable_counts",
        "are_finite_BN.cumprod(1).sum(1)",
        "are_finite_BN.sum(1)",
        "decoding/test_drafters_that_fail.py::test_a_finite_distribution_behind_a_failure[verify_block]",
    ),
    Mutant(
        "a drafted token's noise is that of the first",
        LEVEL + "_draft",
        "[len(sequence) + i for",
        "[len(sequence) for",
        EQUALITY + "test_a_target_that_drafts_for_itself_is_always_right",
    ),
    Mutant(
        "the copy of fewer bits verifies at the last level",
        "minitri.memory.allocate",
        """verifying = ModelRunner(
            target,""",
        """verifying = ModelRunner(
            models.retrieval,""",
        "gpu_twins/test_eight_bits.py::"
        "test_a_copy_however_wrong_changes_no_text[wrong-triforce-sampling0]",
    ),
    Mutant(
        "a copy of fewer bits rounds the model itself",
        "minitri.gpu.eight_bits.quantize",
        "weight.float() / scales.unsqueeze(1)",
        "weight.float().div_(scales.unsqueeze(1))",
        "gpu_twins/test_eight_bits.py::"
        "test_a_copy_is_as_large_as_planned_and_shares_the_rest[False]",
    ),
    Mutant(
        "a bias is added by every rank",
        SPLIT + "_share",
        "if ranks.rank == 0 else tensor.new_zeros(tensor.shape)",
        "",
        BIASES,
    ),
    Mutant(
        "every rank embeds what another one has, too",
        SPLIT + "SplitLlama.embed",
        "rows.where(is_here.unsqueeze(-1), 0)",
        "rows",
        BIASES,
    ),
    Mutant(
        "a rank follows its own verdict",
        "minitri.parallel.ranks.RankGroup.agree",
        "value, error = self._of_first((value, error))",
        "pass",
        SHARES + "test_memory_is_the_least_of_all_ranks_and_an_error_that_of_rank_0",
    ),
    Mutant(
        "a layer that is not waited for",
        OFFLOADED + "_update_hosted",
        "buffer.ready.wait()",
        "pass",
        RACES + "test_every_conflict_is_put_in_order_by_events[retrieval-1-2]",
    ),
    Mutant(
        "a layer fetched before it is stored",
        OFFLOADED + "_fetch",
        "staging.stored.wait()",
        "pass",
        RACES + "test_every_conflict_is_put_in_order_by_events[retrieval-1-2]",
    ),
    Mutant(
        "a block written over one that is on its way",
        OFFLOADED + "update",
        "self._staging.stored.wait()",
        "pass",
        RACES + "test_trees_need_no_other_events",
    ),
    Mutant(
        "a prompt read over a block that is on its way",
        LAYERS + "RowInWork.__init__",
        "self._staging.stored.wait()",
        "pass",
        RACES + "test_trees_need_no_other_events",
    ),
    Mutant(
        "a buffer that changed its layer and does not say when",
        OFFLOADED + "_fetch",
        "if not (missing or is_other):",
        "if not missing:",
        RACES + "test_every_conflict_is_put_in_order_by_events[retrieval-1-2]",
    ),
    Mutant(
        "a prefix fetched again for every chunk",
        LAYERS + "RowInWork.update",
        "buffer.num_held[self._rows.start] =",
        "_ =",
        BY_LAYERS + "test_nothing_travels_twice[0]",
    ),
    Mutant(
        "queries of the last chunk alone",
        LAYERS + "first_watched",
        "num_last = 1 + -(-(window - 1) // size)",
        "num_last = 1",
        BY_LAYERS + "test_the_retrieval_cache_is_as_if_it_had_seen_every_chunk[200-16-16]",
    ),
    Mutant(
        "a prompt that counts as read before its last layer",
        LAYERS + "read_by_layers",
        "yield chunks[done // L].end",
        "yield end",
        BY_LAYERS + "test_k_and_v_are_those_of_a_cache_on_the_device[2-0-200]",
    ),
    Mutant(
        "the last step's seconds are never read",
        "minitri.decoding.cascade.Cascade.retire",
        "self._clock.settle()",
        "pass",
        CLOCK + "test_every_stage_is_charged_for_its_own_work",
    ),
    Mutant(
        "seconds of a prefill arrive while decoding",
        "minitri.stats.Stats.apart",
        "yield\n        self.rebuilds.clock.settle()",
        "yield",
        CLOCK + "test_the_first_build_belongs_to_the_prefill",
    ),
    Mutant(
        "an event is read before the device has passed it",
        "minitri.gpu.streams.CudaClock.settle",
        "end.synchronize()",
        "pass",
        CLOCK + "test_every_stage_is_charged_for_its_own_work",
    ),
    Mutant(
        "what idle rows wrote stays where a text goes on",
        PREFIX + "_fill",
        "self._full.write(layer, b, keys_KTD, values_KTD)\n            return",
        "return",
        PREFIXES + "test_idle_rows_are_restored",
    ),
    Mutant(
        "a text that is adopted keeps what others wrote over it",
        PREFIX + "adopt",
        "self._fill(b, row, num_tokens)",
        "pass",
        PREFIXES + "test_slots_that_passes_of_others_wrote_over_are_put_back[in place-0]",
    ),
    Mutant(
        "a guard that is one slot short",
        PREFIX + "_guard",
        "min(len(tokens), self._num_guarded)",
        "min(len(tokens), self._num_guarded - 1)",
        PREFIXES + "test_slots_that_passes_of_others_wrote_over_are_put_back[-1]",
    ),
    Mutant(
        "generated tokens count as exact in a file",
        "minitri.caches.snapshots.write_snapshot",
        "str(source.num_exact)",
        "str(num_tokens)",
        "reuse/test_snapshots.py::test_tokens_that_were_generated_stay_inexact_in_a_file",
    ),
    Mutant(
        "a copy of a row takes what idle rows wrote",
        "minitri.caches.prefixes.HeldRow.layers",
        "if self.first is not None:",
        "if False:",
        PREFIXES + "test_idle_rows_are_restored_for_others",
    ),
    Mutant(
        "one token too many counts as common",
        "minitri.caches.prefixes.num_common",
        "return next(number for",
        "return 1 + next(number for",
        PREFIXES + "test_nothing_of_other_texts_is_read",
    ),
    Mutant(
        "guesses in flight count as certain",
        PREFIX + "keep",
        "text[: self._num_certain[b]], self._num_exact(b)",
        "text[: self._full.lengths[b]], self._full.lengths[b]",
        PREFIXES + "test_ctrl_c_in_the_middle_of_a_step_loses_nothing_that_was_certain",
    ),
    Mutant(
        "K and V of decoding taken for those of a prompt",
        PREFIX + "_num_exact",
        "return held if self._reads_alike else",
        "return held if True else",
        PREFIXES + "test_on_compiled_kernels_texts_are_equal_to_the_bit[bfloat16]",
    ),
    Mutant(
        "a short chunk of a prompt read like a block of decoding",
        "minitri.cpu.kernel_layers.KernelLayers.forward",
        "shared.is_prompt or ",
        "",
        "cpu/test_pass.py::test_chunks_of_a_prompt_may_begin_anywhere[bfloat16]",
    ),
    Mutant(
        "log-probabilities behind the filters",
        SAMPLING + "log_probs",
        "logits_NV.log_softmax",
        "(logits_NV / 0.8).log_softmax",
        "reuse/test_logprobs.py::test_they_are_those_of_the_plain_forward_pass",
    ),
    Mutant(
        "log-probabilities of a tree's first nodes, not of its path",
        TREES + "level.TreeLevel.verify",
        "output.logits_BNV[b, [0, *path]]",
        "output.logits_BNV[b, : 1 + len(path)]",
        "reuse/test_logprobs.py::"
        "test_they_are_those_of_autoregressive_decoding[sampling0-naive-3x2]",
    ),
    Mutant(
        "guesses for a request that wants none",
        "minitri.decoding.cascade.Cascade.step",
        "on and guess for",
        "on for",
        "reuse/test_open_runs.py::test_a_request_without_speculation_stands_beside_others[False-]",
    ),
]
