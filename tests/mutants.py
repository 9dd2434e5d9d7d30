"""The table of mutants: bugs that other engines had, or that an earlier test let pass.

The published TriForce code, its tree version and several samplers had the first ones. Each is a
change of an expression or statement of a real function, under the test that notices it:

    FILE::TEST
      name of the bug | FUNCTION: what stands there => what stands there instead

Spaces, line breaks and the file of the function do not matter; `FUNCTION#2` is the second place of
that text, `FILE:FUNCTION` says which function of that name.
"""

from tests.mutation import read_table

TABLE = r"""
core/decoding/test_enumeration.py::test_both_levels_together_give_the_target_distribution[3-1-1]
  resample from p-hat | _sample_next: (scale_B1 * p_BV - q_BV).clamp_min(0) => p_BV
  bonus token from the wrong row
    _sample_next: (rows, num_accepted_B)
    => (rows, num_accepted_B.clamp_max(guesses.tokens_BN.shape[1] - 1))
  biased acceptance numbers
    verification:verify: uniforms_BN[:, :-1] => uniforms_BN[:, :-1] ** 1.001
  q without top-p
    Level.propose: probs[b].append(row.probs_NV)
    => probs[b].append(0.8 * row.probs_NV + 0.2 / row.probs_NV.shape[1])
  greedy draft scored with soft q
    RandomSource.sample: sample_by_number(probs_BV, numbers_B.to(probs_BV.device,
        non_blocking=True))
    => probs_BV.argmax(1)
  acceptance number reused for the recovered token | _sample_next: -1 => last - 1
  padding counted as guesses
    Guesses.num_passed_B: passes_BN & self.are_real_BN => passes_BN.int()
engine/test_random_source.py::test_all_numbers_of_a_run_are_distinct[triforce]
  reused noise
    IndependentSource.uniforms: self._by_row[b] => self._by_row[b].manual_seed(7)
  n numbers drawn instead of n + 1
    IndependentSource.numbers: self.uniforms(b, n + 1)
    => self.uniforms(b, max(n, 1)).repeat(2)[:n + 1]
  float32 uniforms
    IndependentSource.uniforms: torch.rand(count, dtype=torch.float64,
        generator=self._by_row[b])
    => torch.rand(count, dtype=torch.float32, generator=self._by_row[b]).double()
core/decoding/test_noise.py::test_gumbel_noise_is_of_fine_numbers_that_differ
  24-bit Gumbel noise
    hashed_uniforms: (_shift_right(splitmix(keys + numbers * _STEP), 12).double() + 0.5)
        * 2.0 ** (-52)
    => (_shift_right(splitmix(keys + numbers * _STEP), 40).double() + 0.5) * 2.0 ** (-24)
core/decoding/test_noise.py::test_no_seed_repeats_the_noise_of_another_at_another_position
  noise key of hash(seed + position) | noise_keys: splitmix(torch.tensor(seed)) => seed
core/decoding/test_noise.py::test_coupled_tokens_follow_the_distribution_at_every_position
  noise of the wrong sign
    gumbel: -(-hashed_uniforms(keys, numbers).log()).log()
    => (-hashed_uniforms(keys, numbers).log()).log()
core/caches/test_streaming_cache.py::test_a_row_that_is_far_back_is_started_over
  streaming length not reset | DraftRunner._read_window: self.cache.reset(b) => pass
engine/test_equality.py::test_a_target_that_drafts_for_itself_is_always_right[distribution1]
  last accepted token dropped from the drafter
    ModelRunner.unread: sequence[num_read:]
    => sequence[max(num_read, len(sequence) - 1) :]
  guesses read one place too early | Passes.forward: places_BN[:, 1:] => places_BN[:, :-1]
  a drafted token's noise is that of the first | Level._draft: len(sequence) + i => len(sequence)
devices/cpu/test_draft_round.py::test_rounds_below_a_retrieval_level_have_these_bits
  a round in one call hands up the distribution of the guess before
    DraftRound.guess: (tokens_BN, probs_BNV) => (tokens_BN, probs_BNV.roll(1, 1))
core/caches/test_retrieval_cache.py::test_committed_tokens_overwrite_the_least_important_slots_first[1]
  retrieval tail not refreshed
    RetrievalCache._copy_committed: zip((self.keys, self.values), exact, strict=True)
    => zip((self.keys, self.values), exact) if start == 0 else ()
test_properties.py
::test_greedy_and_coupled_runs_equal_autoregressive_ones_or_are_refused[1]
  EOS as bonus token ignored
    Generation._emit: row.push(token, origin, eos, *score)
    => row.push(token, origin, () if origin == 'bonus' else eos, *score)
core/test_runner.py::test_a_bfloat16_models_distributions_are_float32[sampling0]
  logits kept in bfloat16 for the softmax
    Llama.logits: self.lm_head(hidden).float() => self.lm_head(hidden)
core/test_runner.py::test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_after_it[sampling0]
  logits rounded to bfloat16 before the filters
    ModelRunner._output: probs_of_rows(filtered_BNV, self.sampling,
        self.model.execution.probs)
    => probs_of_rows(logits_BNV.bfloat16().float(), self.sampling, self.model.execution.probs)
core/caches/test_retrieval_cache.py::test_the_queries_that_choose_are_those_that_attend
  unrotated queries choose chunks
    Attention.forward: q_BTHD[:, -shared.queries_LBTHD.shape[2]:]
    => heads[:, -shared.queries_LBTHD.shape[2]:, :self.heads[0]]
core/decoding/test_enumeration.py::test_a_residual_that_vanishes_falls_back_to_p
  a guess of probability 0 accepted by the number 0
    verification:verify: uniforms_BN[:, :-1] * q_BN < p_BN => uniforms_BN[:, :-1] * q_BN <= p_BN
core/decoding/test_enumeration.py::test_both_levels_together_give_the_target_distribution[3-2-1]
  q of the next guess | _sample_next: num_accepted_B.clamp_max => (num_accepted_B + 1).clamp_max
  accepted guesses counted after a rejection
    Guesses.num_passed_B: (passes_BN & self.are_real_BN).cumprod(1) => passes_BN & self.are_real_BN
core/decoding/test_enumeration.py::test_blocks_at_both_levels_give_the_target_distribution[3-2-1-4]
  a block's recovered token from the residual of single tests
    _sample_next: scale_B1 * p_BV => p_BV
  a block tested without the mass of what its rejection leaves
    verify_block: S_BN / (S_BN + 1 - w_BN) => S_BN * 0 + w_BN
  what a block's rejection leaves, of the guess before
    verify_block: (scales_BN1[:, 1:N] * p_BNV[:, 1:N]).sub_(q_BNV[:, 1:])
    => (scales_BN1[:, 1:N] * p_BNV[:, :N - 1]).sub_(q_BNV[:, :N - 1])
  a block's chances capped at 1 at the end only | verify_block: logs_BN.cummax(1).values => logs_BN
  a block ends at the first test that fails
    verify_block: (passes_BN * lengths_N).amax => passes_BN.cumprod(1).sum
engine/test_random_source.py::test_a_rows_numbers_do_not_depend_on_its_neighbours[triforce]
  one generator for all rows
    IndependentSource.uniforms: self._by_row[b] => self._by_row[0]
  a row that has ended draws on | IndependentSource.numbers: active[b] => True
  a short row's last number put after its guesses
    IndependentSource.numbers: [*range(n), -1] => [*range(n), n]
test_matrix.py::test_the_text_is_the_autoregressive_one[triforce, near-coupled-in_a_batch]
  coupled: one noise for a whole block
    CoupledSource.numbers: start + places_N => start + 0 * places_N
  coupled: noise by the place in the block | CoupledSource.numbers: start + places_N => places_N
core/decoding/test_sampling.py
::test_every_combination_of_filters_is_the_distribution_by_definition[0.0-0.95-0-0.2]
  top-p drops the token that reaches the mass
    _top_p_cutoff: running_sums(probs) - probs => running_sums(probs)
devices/gpu_twins/test_attention_backends.py
::test_every_backend_equals_the_oracle[True-heads0-prefixes0-3-triton]
  a tree read as a chain by the kernel
    attend_short_block: attend_piece[num_tiles, P, B * K](*tensors, scale, *counts, *strides,
        D=D, HAS_RULE=has_rule, **sizes)
    => attend_piece[num_tiles, P, B * K](*tensors, scale, *counts, *strides, D=D,
        HAS_RULE=False, **sizes)
devices/gpu_twins/test_attention_backends.py
::test_grouped_queries_in_float32_reach_no_kernel_that_holds_all_scores
  all scores of a chunk held at once in float32
    attend_fused: q_BTHD.dtype == torch.float32 => False
devices/gpu_twins/test_fused_modules.py::test_the_network_adds_and_norms_in_another_order_only
  fused layers forget the last addition | FusedLayers.forward: x_BTE + change_BTE => x_BTE
core/decoding/test_sampling.py::test_a_token_of_probability_zero_is_never_drawn
  a token of probability 0 sampled at an edge
    sampling:sample: torch.searchsorted(cdf_NV, targets_N1, right=True)
    => torch.searchsorted(cdf_NV, targets_N1, right=False)
core/decoding/test_enumeration.py::test_nothing_leaks_from_one_step_into_the_next
  rejected guesses left in the cache
    Level._append: len(sequence) - bool(new.tokens) => len(sequence)
core/caches/test_retrieval_cache.py::test_what_is_read_after_the_chosen_stands_where_it_does_in_the_text
  positions of slots, not of tokens | pack_block: cache.next_positions => cache.lengths
core/caches/test_retrieval_cache.py
::test_a_build_holds_exactly_what_the_policy_chooses[1-retrieval-8-150]
  sinks may be dropped
    RetrievalCache._select: scores_KN[:, :sinks] = scores_KN[:, N - recent:] = math.inf
    => scores_KN[:, N - recent:] = math.inf
core/caches/test_streaming_cache.py::test_a_deep_model_keeps_sinks_and_rotates_keys_by_their_slots
  a window slides but its keys keep their rotation
    StreamingCache.slide: self._rope.at(positions) => self._rope.at(positions + 1)
core/caches/test_caches_after_steps.py
::test_the_full_cache_equals_a_fresh_prefill_of_the_accepted_tokens
::[autoregressive-None-sampling0-False]
  a retired row's cache is not emptied | Cascade.retire: stage.reset(b) => stage
test_properties.py::test_a_stop_string_ends_a_text_at_the_same_place_however_it_is_cut
  the first stop string of the list, not of the text | StopScanner.push: min(ends) => ends[0]
test_properties.py::test_a_stop_string_ends_a_text_at_the_same_place_however_it_is_cut
  of two stop strings that end together the shorter
    StopScanner.push: min(ends) => min(ends, key=lambda end: (end[0], -end[1]))
core/drafters/test_lookup.py::test_rejected_guesses_are_never_learnt
  lookup learns guesses
    GrowingText.propose: length, guess = self.lookup(sequence, gamma)
    => self.extend(sequence[len(self.tokens):]); length, guess = self.lookup(sequence, gamma)
core/drafters/test_lookup.py::test_a_row_that_ended_is_forgotten
  a row that ends leaves its text to the next
    LookupDrafter.reset: self._rows[b] = GrowingText() => self._rows[b]._guess = []
test_properties.py::test_a_stop_string_ends_a_text_at_the_same_place_however_it_is_cut
  text that may begin a stop string is not held back
    StopScanner.push: max((overlap(text, stop) for stop in self._stop), default=0) => 0
test_stream.py::test_every_request_gets_what_it_gets_alone[2-naive]
  a row that is given to another text goes on with its noise
    IndependentSource.restart: self._by_row[b] = torch.Generator().manual_seed(seed)
    => self._by_row.setdefault(b, torch.Generator().manual_seed(seed))
test_engine.py::test_seeds_decide_and_belong_to_rows
  a row's own seed is not used
    Stack.admit: self.source.restart(b, request.seed or 0) => self.source.restart(b, 0)
test_stream.py::test_every_request_gets_what_it_gets_alone[2-triforce]
  a new text is sampled by the old one's filters
    ModelRunner.sample_by: self.sampling[b] = sampling => pass
trees/test_tree_enumeration.py::test_a_tree_that_the_target_verifies_gives_its_distribution[six-10]
  siblings share the number of their tests | walk: uniforms[child] => uniforms[node + 1]
  a younger sibling tested against p, not the residual
    walk: rest_V[token] => probs_NV[node][token]
  the token after a path comes from p, not the residual
    walk: sample(rest_V, uniforms[0].to(rest_V.device)) => sample(probs_NV[node], uniforms[0])
  a sibling's q still holds the elder ones | walk: left_V[token] = 0 => left_V[token] += 0
  children drawn with replacement | draw_children: left_V[token] = 0 => left_V[token] += 0
core/caches/test_caches_after_steps.py
::test_the_full_cache_equals_a_fresh_prefill_of_the_accepted_tokens
::[naive tree 3x2-0.02-sampling0-False]
  a tree's tokens numbered by node, not by depth
    TreeLevel.read_tree: shape.depths[first:first + T] => range(first, first + T)
trees/test_shape.py::test_a_node_sees_itself_and_its_ancestors
  a node sees its elder siblings
    TreeShape.rule_TT: rule_TT[node] |= rule_TT[parent] => rule_TT[node, :node] = True
core/caches/test_caches_after_steps.py
::test_the_full_cache_equals_a_fresh_prefill_of_the_accepted_tokens
::[naive tree 7-0.02-sampling0-False]
  a path gathered in the wrong order | gather_path: torch.tensor(path) => torch.tensor(path[::-1])
trees/test_tree_enumeration.py
::test_a_tree_by_or_below_the_retrieval_level_gives_the_target_distribution[1-fork]
  a tree's rows of p in the order of its nodes, not of the path
    TreeLevel.verify: output.emitted(b, tokens, origins, [0, *path][: len(tokens)])
    => output.emitted(b, tokens, origins, slice(1 + len(path)))
trees/test_tree_sampling.py::test_every_child_and_every_test_has_a_number_of_its_own
  numbers of a tree's children used again for its tests
    IndependentSource.uniforms: self._by_row[b] => torch.Generator().manual_seed(b)
test_matrix.py::test_the_text_is_the_autoregressive_one[naive, tree 7-coupled-in_a_batch]
  noise of a tree by node, not by position
    TreeLevel.walk: start + torch.tensor(proposal.shape.depths)
    => start + torch.tensor(proposal.shape.depths) + len(proposal.shape)
devices/gpu_twins/test_host_round_trips.py
::test_a_step_waits_once_for_every_verdict[triforce-sampling0-how0]
  a drafted token fetched by the host
    DraftRunner.guess: tensor.clone() => tensor.new_tensor(tensor.tolist())
engine/test_drafters_that_fail.py
::test_a_damaged_model_stops_the_run_and_is_named[naive--draft-True]
  guesses with a distribution that is not finite count
    Guesses.are_finite_B: ~are_real_BN => self.q_BNV.sum(2).isnan()
engine/test_drafters_that_fail.py
::test_one_row_of_four_fails_alone_and_leaves_nothing[autoregressive--model-False]
  a row that is not finite goes on
    Verdict.to_host: [*tokens[:n], last] if finite else [] => [*tokens[:n], last]
  K and V that are not finite are kept for the next text
    Stack.retire: self.sequences[b] if is_sound else [] => self.sequences[b]
engine/test_drafters_that_fail.py
::test_one_row_of_four_fails_alone_and_leaves_nothing[triforce--draft-False]
  the target is not told that a guess is not finite | decide: b in proposal.failed => False
engine/test_drafters_that_fail.py
::test_one_row_of_four_fails_alone_and_leaves_nothing[naive-4-draft-False]
  a tree that is not finite fails all rows
    finite_rows: (sums_BN.isfinite() | ~are_real_BN).all(1)
    => (sums_BN.isfinite() | ~are_real_BN).all().expand(len(nodes))
devices/gpu_twins/test_capture_lint.py
::test_so_do_trees_and_guesses_of_no_fixed_length[naive-how0-sampling0-False]
  a captured tree sees what its block is padded with
    ModelRunner.read_tree: torch.block_diag(rule_TT, torch.eye(pad, dtype=torch.bool))
    => F.pad(rule_TT, (0, pad, 0, pad), value=True)
  a captured tree keeps the shape that it was captured with
    GraphPool.capture: zip(buffers, tree_leaves(inputs), strict=True)
    => zip(buffers[:2], tree_leaves(inputs))
devices/gpu_twins/test_quantized_copies.py::test_a_copy_however_wrong_changes_no_text[triforce-4-sampling0]
  the copy of fewer bits verifies at the last level
    allocate: ModelRunner(target, full, **common,
        queries_LBTHD=cache.queries_LBTHD if cache else None,
        graphs=None if isinstance(full, OffloadedFullCache) else graphs,
        block_sizes={min(size, speculation.max_block) for size in TARGET_BLOCKS})
    => ModelRunner(models.retrieval, full, **common)
devices/gpu_twins/test_quantized_copies.py::test_a_copy_is_as_large_as_planned_and_shares_the_rest[False-4]
  the largest number of a group is cut off
    quantized_copies:quantize: most_NG > -least_NG => most_NG > least_NG
devices/parallel/test_split.py::test_shares_give_the_logits_of_the_whole[biases, a vocabulary of 321-2]
  a bias is added by every rank
    share: tensor if ranks.rank == 0 else tensor.new_zeros(tensor.shape) => tensor
  every rank embeds what another one has, too
    SplitLlama.embed: rows.where((nearest == numbers).unsqueeze(-1), 0) => rows
devices/parallel/test_split.py::test_memory_is_the_least_of_all_ranks_and_an_answer_or_error_that_of_rank_0
  a rank follows its own verdict
    RankGroup.ask_first: self._call(dist.broadcast_object_list, sent, 0) => pass
devices/gpu_twins/test_offloaded_cache.py
::test_what_is_written_into_a_row_is_read_after_a_pass_of_others[0]
  the latest block stands for tokens that were written after it
    OffloadedFullCache.write: self.latest_starts[b] = self.capacity => pass
devices/gpu_twins/test_offloaded_cache.py::test_every_conflict_is_put_in_order_by_events[retrieval-1]
  a layer that is not waited for | OffloadedFullCache.update_hosted: buffer.ready.wait() => pass
devices/gpu_twins/test_offloaded_cache.py::test_trees_need_no_other_events
  a block written over one that is on its way
    OffloadedFullCache.fetch: buffer.ready.record()
    => missing.start < missing.stop and buffer.ready.record()
devices/gpu_twins/test_layer_major.py::test_nothing_travels_twice[0]
  a prefix fetched again for every chunk
    HostedRow.update: buffer.num_held[self._b] = self.lengths[0] + block.keys_BTKD.shape[1] => pass
devices/gpu_twins/test_layer_major.py::test_the_retrieval_cache_is_as_if_it_had_seen_every_chunk[200-16-16]
  queries of the last chunk alone
    read_by_layers: start + chunk > end - max_queries => start + chunk >= end
devices/gpu_twins/test_layer_major.py::test_k_and_v_are_those_of_a_cache_on_the_device[0-200]
  a prompt that counts as read before its last layer
    read_by_layers: starts[done // L + 1] => end
devices/gpu_twins/test_device_clock.py::test_every_stage_is_charged_for_its_own_work
  an event is read before the device has passed it | CudaClock.settle: end.synchronize() => pass
files/reuse/test_prefixes.py::test_slots_that_passes_of_others_wrote_over_are_put_back[in place-0]
  a text that is adopted keeps what others wrote over it
    PrefixCache.adopt: self._fill(b, row, len(tokens)) => pass
files/reuse/test_prefixes.py::test_slots_that_passes_of_others_wrote_over_are_put_back[-1]
  a guard that is one slot short | PrefixCache._guard: self._num_guarded => self._num_guarded - 1
devices/cpu/test_pass.py
::test_chunks_may_begin_anywhere_on_a_machine_whose_products_depend_on_their_size[True]
  few rows are multiplied in another way than many | product_tile: None if is_same else TILE => None
files/reuse/test_prefixes.py::test_idle_rows_are_restored[for another]
  a copy of a row takes what idle rows wrote
    HeldRow.layers: enumerate(self.first_LPKTD) => ()
files/reuse/test_prefixes.py::test_nothing_of_other_texts_is_read
  one token too many counts as common
    num_common: len(os.path.commonprefix((tokens, prompt)))
    => 1 + len(os.path.commonprefix((tokens, prompt)))
files/reuse/test_prefixes.py::test_ctrl_c_in_the_middle_of_a_step_loses_nothing_that_was_certain
  guesses in flight count as certain | PrefixCache.keep: self._num_exact(b) => self._full.lengths[b]
files/reuse/test_prefixes.py::test_on_compiled_kernels_texts_are_equal_to_the_bit[bfloat16]
  K and V of decoding taken for those of a prompt
    PrefixCache._num_exact: self._reuses_generated => True
devices/cpu/test_pass.py::test_chunks_may_begin_anywhere_on_three_threads
  SiLU of a prompt by all threads in float32
    use_kernels: model.dtype == torch.float32 => False
devices/cpu/test_pass.py::test_chunks_of_a_prompt_may_begin_anywhere[bfloat16-small]
  a short chunk of a prompt read like a block of decoding
    KernelLayers.forward: shared.is_prompt or x_BTE.shape[1] > LONGEST_BLOCK
    => x_BTE.shape[1] > LONGEST_BLOCK
files/reuse/test_logprobs.py::test_they_are_those_of_the_plain_forward_pass
  log-probabilities after the filters
    sampling:log_probs: logits_NV.log_softmax => (logits_NV / 0.8).log_softmax
files/reuse/test_logprobs.py::test_they_are_those_of_autoregressive_decoding[sampling0-naive-3x2]
  log-probabilities of a tree's first nodes, not of its path
    Output.emitted: self.logits_BNV[b, places] => self.logits_BNV[b, :len(tokens)]
apps/serve/test_answers.py::test_a_call_without_speculation_says_the_same
  guesses for a request that wants none | Cascade.step: on and guess => on
core/test_runner.py::test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_after_it[sampling0]
  a drafter's vocabulary cut after the softmax
    Passes.head: self.model.logits(hidden_BNE)[..., : self.vocab_size]
    => self.model.logits(hidden_BNE)
core/decoding/test_enumeration.py::test_blocks_at_both_levels_give_the_target_distribution[3-1-1-3]
  a block's last guess tested as if another followed
    verify_block: have_next_BN & (w_BN < 1) => guesses.are_real_BN & (w_BN < 1)
core/decoding/test_block_verification.py
::test_a_row_does_not_depend_on_its_neighbours_nor_on_what_pads_it[0.1]
  padding accepted with a block
    verify_block: (uniforms_BN[:, :-1] < h_BN) & guesses.are_real_BN
    => uniforms_BN[:, :-1] < h_BN
devices/gpu_twins/test_device_clock.py::test_every_stage_is_charged_for_its_own_work
  the last step's seconds are never read | Cascade.retire: self._meter.settle() => pass
  a prefill's commit counts as decoding's
    Stack.start: self._commit(outcome) => with self.meter.commit(): self._commit(outcome)
devices/gpu_twins/test_graphs.py
::test_a_captured_pass_gives_logits_too_and_a_closed_pool_captures_nothing
  a shape that was not captured is captured between steps
    GraphPool.run: self.is_open and key not in self._captured => key not in self._captured
test_worker.py::test_a_request_that_fails_is_told_why_and_the_next_one_runs[submit]
  a request that cannot be taken waits for ever | Worker._start: report(error, job) => pass
test_worker.py::test_a_request_that_fails_is_told_why_and_the_next_one_runs[__next__]
  requests of a run that failed wait for ever
    Worker._step: report(error, *self._jobs.values()) => pass
files/reuse/test_prefixes.py::test_idle_rows_are_restored[in its row]
  what idle rows wrote stays where a text goes on
    PrefixCache._fill: source.layers(num_tokens) => () if is_there else source.layers(num_tokens)
core/decoding/test_sampling.py::test_a_row_has_filters_of_its_own
  filters grouped by their form alone
    probs_of_rows: row == params[0] => row.form == params[0].form
trees/test_tree_sampling.py::test_a_row_that_guesses_nothing_takes_one_number
  numbers by the size of a tree for a row that guesses nothing
    TreeLevel.walk: len(proposal.shape) if proposal.depth(b) else 1 => len(proposal.shape)
test_stream.py::test_every_request_gets_what_it_gets_alone[4-triforce]
  a part of the rows draws the numbers of others
    RandomSource.of_rows: b - rows.start => b - rows.start + (rows.start > 0)
  a part of the rows has the filters of others
    ModelRunner.of_rows: self.sampling[rows] => self.sampling[: len(part.cache.lengths)]
  a part of the rows notes its queries for others
    ModelRunner.of_rows: queries_LBTHD[:, rows] => queries_LBTHD[:, : len(part.cache.lengths)]
  a part of the rows has lengths of its own
    Cache.of_rows: self._filled[rows] => copy.deepcopy(self._filled[rows])
test_stream.py::test_rows_without_a_text_are_in_no_pass[naive]
  passes over all rows, idle ones too
    Stack._part: slice(min(rows), max(rows) + 1) => slice(0, len(self.sequences))
files/test_native_weights.py::test_repacked_numbers_are_the_dequantized_ones[Q4_K]
  minima taken for scales | _with_minima: first & 63 => second & 63
  high bits of scales from those of minima
    _with_minima: both & 15 | first >> 2 & 48 => both & 15 | second >> 2 & 48
files/test_native_weights.py::test_repacked_numbers_are_the_dequantized_ones[Q6_K]
  groups of Q6_K in the order of the file | _of_6_bits: others << 4 => others.flip(3) << 4
files/test_native_weights.py::test_weights_stay_quantized_where_memory_is_short
  weights dequantized for which there is no memory
    plan_weights: num_bytes > free_bytes => num_bytes > 2 * free_bytes
text/test_text_filters.py
::test_both_levels_together_give_the_filtered_distribution[sizes1-params0-words0]
  counts without the guesses
    paths_of: [*start, *(block[i] for i in nodes)] => start
  the prompt counted by the presence penalty
    TextFilters.__init__: self.text = [*prompt] => self.text = []
  a token that stands there twice penalised once
    penalised: params.frequency_penalty * counts_NU => params.frequency_penalty * (counts_NU > 0)
text/test_text_filters.py
::test_both_levels_together_give_the_filtered_distribution[sizes1-params1-words1]
  the least number of tokens counts those of the prompt
    TextFilters._banned: len(self.text) - self._first + len(path) => len(self.text) + len(path)
  bad words end with the certain tokens
    TextFilters._banned: [*self.text[max(0, len(self.text) - self._sizes[-1]) :], *path]
    => self.text[max(0, len(self.text) - self._sizes[-1]) :]
text/test_text_filters.py
::test_bias_and_penalties_come_before_temperature_and_other_filters[filters0]
  bias after top-p
    ModelRunner._output: probs_of_rows(filtered_BNV, self.sampling,
        self.model.execution.probs)
    => filtered_logits(probs_of_rows(logits_BNV, self.sampling).log(), self.text_filters,
        paths).softmax(-1)
text/test_grammars.py::test_both_levels_together_give_the_masked_distribution[sizes0]
  mask of the position before
    TextFilters.apply: self.matcher.forbidden(path) => self.matcher.forbidden(path[:-1])
  a matcher that is not rolled back
    GrammarMatcher._read: self._matcher.rollback(len(self._path) - common) => None
  an end token allowed inside
    GrammarMatcher._mask: not (is_over or self._matcher.is_accepting()) => False
text/test_grammars.py::test_forced_text_is_a_guess_about_how_it_is_cut[sizes1-verify_block]
  text that is forced is cut into tokens in one way
    compile_grammar: f"{text}\n{NOT_FORCED}" => text
  forced text accepted by halves
    Proposal.with_forced: F.one_hot(ids_N, V + more_words) => F.one_hot(ids_N, V + more_words) / 2
text/test_engines.py
::test_a_row_is_filtered_by_its_own_text_whatever_its_neighbours_do[triforce]
  a part of the rows has the penalties of others
    ModelRunner.of_rows: self.text_filters[rows] => self.text_filters[: len(part.cache.lengths)]
  penalties of the neighbour
    filtered_logits: zip(filters, logits_BNV, paths, strict=True)
    => zip([*filters[1:], *filters[:1]], logits_BNV, paths, strict=True)
text/test_engines.py::test_on_compiled_kernels_texts_are_equal_to_the_bit[float32-tree]
  the root of a tree counted twice
    ModelRunner.read_tree: row_T.nonzero().flatten().tolist()[has_root:]
    => row_T.nonzero().flatten().tolist()
apps/serve/test_answer_parser.py::test_pieces_do_not_depend_on_where_a_text_is_cut
  a tag that is cut is not a tag
    AnswerParser._pass_to: 0 if self._is_last else overlap(self._rest, tag) => 0
  an escape counts until the end of a piece
    AnswerParser._pass_arguments: is_escaped = character == "\\"
    => is_escaped = character == "\\" and num_read < len(self._rest)
apps/serve/test_answer_parser.py::test_texts_put_together_at_random_lose_nothing
  a tag without a call is lost | AnswerParser._calls: self._add("content", taken) => None
"""

MUTANTS = read_table(TABLE)
