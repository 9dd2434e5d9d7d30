"""The table of mutants: bugs that other engines had, or that an earlier test let pass.

One for each contract of DESIGN.md, sections 1, 8 and 9: the published TriForce code, its tree
version and several samplers had the first ones. Each is a change in a real function, under the test
that notices it; those with a star are tried in the fast run:

    FILE::TEST
      name of the bug | MODULE:FUNCTION: what stands there => what stands there instead
"""

from tests.mutation import read_table

TABLE = r"""
# Every emitted token follows p
core/decoding/test_enumeration.py::test_any_stages_give_the_target_distribution[sizes0]
  * resample from p-hat | core.decoding.verification:_sample_next: (scale_B1 * p_BV).sub_(q_BV).clamp_min_(0) => p_BV
  * biased acceptance numbers | core.decoding.verification:verify: uniforms_BN[:, :-1] => uniforms_BN[:, :-1]**1.001
  q without top-p | core.decoding.level:Level.propose: new.probs_NV => 0.8 * new.probs_NV + 0.2 / new.probs_NV.shape[1]
  greedy draft scored with soft q | core.decoding.random_source:RandomSource.sample: sample_by_number( => (lambda p_BV, _: p_BV.argmax(1))(
  acceptance number reused for the recovered token | core.decoding.verification:_sample_next: -1 => last - 1
core/decoding/test_enumeration.py::test_equal_distributions_accept_everything_and_a_vanished_residual_falls_back_to_p[verify]
  * a guess of probability 0 accepted by the number 0 | core.decoding.verification:verify: < p_BN => <= p_BN
core/decoding/test_enumeration.py::test_blocks_give_the_target_distribution[3-2-1-4]
  * a block ends at the first test that fails
    | core.decoding.verification:verify_block: (passes_BN * lengths_N).amax => passes_BN.cumprod(1).sum
core/decoding/test_reference.py::test_the_cascade_equals_algorithm_1[1]
  a block is one token short | core.decoding.level:Level.propose: len(origins[b]) < => len(origins[b]) + 1 <
core/decoding/test_sampling.py::test_every_combination_of_filters_is_the_distribution_by_definition[0.0-0.95-0-0.2]
  * top-p drops the token that reaches the mass
    | core.decoding.sampling:_top_p_cutoff: running_sums(probs) - probs => running_sums(probs)
core/test_runner.py::test_a_bfloat16_models_distributions_are_float32[sampling0]
  logits kept in bfloat16 for the softmax | core.model.llama:Llama.logits: .float() => [:]
core/test_runner.py::test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_after_it[sampling0]
  a drafter's vocabulary cut after the softmax | core.runner:Passes.head: [..., :self.vocab_size] => [:]
# The random source
engine/test_random_source.py::test_all_numbers_of_a_run_are_distinct[speculation2]
  reused noise | core.decoding.random_source:IndependentSource.uniforms: self._by_row[b] => self._by_row[b].manual_seed(7)
  * float32 uniforms | core.decoding.random_source:IndependentSource.uniforms: [b]) => [b]).float().double()
core/decoding/test_noise.py::test_gumbel_noise_is_of_fine_numbers_that_differ
  24-bit Gumbel noise | core.decoding.sampling:hashed_uniforms: 12).double() + 0.5) => 40).double() + 0.5) * 2.0 ** 28
core/decoding/test_noise.py::test_no_seed_repeats_the_noise_of_another_at_another_position
  * noise key of hash(seed + position) | core.decoding.sampling:noise_keys: splitmix(torch.tensor(seed)) => seed
test_matrix.py::test_the_text_is_the_autoregressive_one[triforce, near copy-coupled-0]
  coupled: one noise for a whole block | core.decoding.random_source:CoupledSource.numbers: start + => start + 0 *
test_stream.py::test_every_request_gets_what_it_gets_alone[naive]
  one generator for all rows | core.decoding.random_source:IndependentSource.uniforms: self._by_row[b] => self._by_row[0]
# Caches
core/decoding/test_enumeration.py::test_nothing_leaks_from_one_step_into_the_next
  * rejected guesses left in the cache | core.decoding.level:Level._append: - bool(new.tokens) => - 0
core/caches/test_streaming_cache.py::test_a_prompt_costs_one_pass_over_the_window[160-10]
  streaming length not reset | core.runner:DraftRunner._read_window: self.cache.reset(b) => pass
engine/test_switching_plans.py::test_a_target_that_drafts_for_itself_is_always_right[distribution1]
  last accepted token dropped from the drafter
    | core.runner:ModelRunner.unread: sequence[num_read:] => sequence[max(num_read, len(sequence) - 1):]
core/caches/test_retrieval_cache.py::test_slots_hold_what_the_policy_chose_and_every_token_committed_since[retrieval-48-8-159-200-15]
  retrieval tail not refreshed
    | core.caches.retrieval:RetrievalCache._copy_committed: zip((self.keys, self.values), exact, strict=True)
    => zip((self.keys, self.values), exact) if start == 0 else ()
core/caches/test_retrieval_cache.py::test_the_queries_that_choose_are_those_that_attend
  unrotated queries choose chunks
    | core.model.llama:Attention.forward: q_BTHD[:, -shared.queries_LBTHD.shape[2]:]
    => heads[:, -shared.queries_LBTHD.shape[2]:, :self.heads[0]]
core/caches/test_retrieval_cache.py::test_layers_with_a_window_read_all_of_it_whatever_the_budget
  a window is put in wrong slots | core.caches.retrieval:RetrievalCache._copy_window: % self.capacity => % (self.capacity - 1)
  a rebuild leaves a gap in windows | core.caches.retrieval:RetrievalCache.commit: self._copy_window(b) => pass
engine/test_families.py::test_logits_equal_those_of_transformers_and_of_a_gguf_file[mistral]
  a window is one token too long | core.model.attention:Window.__init__: < size => <= size
core/caches/test_retrieval_cache.py::test_what_is_read_after_the_chosen_stands_where_it_does_in_the_text
  positions of slots, not of tokens | core.model.block:pack_block: cache.next_positions => cache.lengths
files/reuse/test_prefixes.py::test_ctrl_c_in_the_middle_of_a_step_loses_nothing_that_was_certain
  guesses in flight count as certain | core.caches.prefixes:PrefixCache._reusable: min(self._full.lengths[b], most - 1) => self._full.lengths[b]
# Stops
test_properties.py::test_a_stop_string_ends_a_text_at_the_same_place_however_it_is_cut
  the first stop string of the list, not of the text | text.tokenizer:StreamDetokenizer.__call__: min(ends) => ends[0]
test_properties.py::test_a_text_ends_at_every_place_of_a_block
  EOS as bonus token ignored | core.generation:Generation._emit: origin, eos, => origin, () if origin == 'bonus' else eos,
# Batches and runs
test_stream.py::test_every_request_gets_what_it_gets_alone[triforce]
  a new text is sampled by the old one's filters | core.runner:ModelRunner.set_sampling: self.sampling[b] = sampling => pass
  a part of the rows draws the numbers of others
    | core.decoding.random_source:RandomSource.of_rows: b - rows.start => b - rows.start + (rows.start > 0)
engine/test_drafters_that_fail.py::test_one_row_of_four_fails_alone_and_leaves_nothing[autoregressive--model]
  a row that is not finite goes on | core.decoding.verification:decide: if is_finite and => if True and
# Trees
trees/test_tree_enumeration.py::test_a_tree_that_the_target_verifies_gives_its_distribution[forks]
  siblings share the number of their tests | trees.tree_level:walk: uniforms[child] => uniforms[node + 1]
  a younger sibling tested against p, not the residual | trees.tree_level:walk: rest_V[token] => probs_NV[node][token]
  * children drawn with replacement | trees.tree_level:draw_children: left_V[token] = 0 => pass
trees/test_shape.py::test_a_node_sees_itself_and_its_ancestors
  a node sees its elder siblings
    | trees.tree_shape:TreeShape.mask_TT: mask_TT[node] |= mask_TT[parent] => mask_TT[node, :node] = True
core/caches/test_caches_after_steps.py::test_caches_hold_the_accepted_tokens_and_rejected_ones_leave_no_trace[naive tree 3x2 0.02 retrieval]
  a tree's tokens numbered by node, not by depth
    | trees.tree_level:TreeLevel.read_tree: shape.depths[first:first + T] => range(first, first + T)
core/caches/test_caches_after_steps.py::test_caches_hold_the_accepted_tokens_and_rejected_ones_leave_no_trace[naive tree 7 0.02 retrieval]
  a path gathered in the wrong order | core.model.cache:gather_path: torch.tensor(path) => torch.tensor(path[::-1])
test_matrix.py::test_the_text_is_the_autoregressive_one[naive, tree 7-coupled-0]
  noise of a tree by node, not by position | trees.tree_level:TreeLevel.walk: start + => start + len(proposal.shape) +
# Filters and grammars are part of the distribution
text/test_text_filters.py::test_both_levels_together_give_the_filtered_distribution[sizes0-penalties]
  counts without the guesses | core.decoding.text_filters:paths_of: for i in nodes => for i in ()
text/test_text_filters.py::test_bias_and_penalties_come_before_temperature_and_other_filters[filters0]
  bias after top-p
    | core.runner:ModelRunner._output: probs_of_rows(filtered_BNV, self.sampling, self.model.execution.probs)
    => filtered_logits(probs_of_rows(logits_BNV, self.sampling).log(), self.text_filters, paths).softmax(-1)
text/test_text_filters.py::test_both_levels_together_give_the_filtered_distribution[sizes0-grammar]
  a matcher that is not rolled back
    | text.matcher:GrammarMatcher._read: self._matcher.rollback(len(self._path) - common) => pass
text/test_grammars.py::test_forced_text_is_a_guess_about_how_it_is_cut[sizes1-verify_block]
  text that is forced is cut into tokens in one way | text.matcher:compile_grammar: {text}\n{NOT_FORCED} => {text}
# Devices and streams
test_matrix.py::test_the_text_is_the_autoregressive_one[triforce, plug-in-greedy-0]
  the copy of fewer bits verifies at the last level | core.memory:allocate: (target, full, => (models.retrieval, full,
devices/gpu_twins/test_offloaded_cache.py::test_every_conflict_is_put_in_order_by_events[retrieval-1-]
  a layer that is not waited for
    | core.offload.offloaded_cache:OffloadedFullCache.update_hosted: buffer.ready.wait() => pass
devices/gpu_twins/test_capture_lint.py::test_captured_steps_hold_what_a_graph_can_hold_and_give_what_eager_ones_give[triforce-sampling6-how6]
  rows of a captured step are not copied
    | core.runner:ModelRunner._output: self.graphs.run(self.passes.probs, filtered_BNV).clone() => self.graphs.run(self.passes.probs, filtered_BNV)
devices/parallel/test_split.py::test_shares_give_the_logits_of_the_whole[biases, a vocabulary of 321-2]
  a bias is added by every rank | devices.parallel.split:share: if ranks.rank == 0 => if True
apps/serve/test_answer_parser.py::test_pieces_do_not_depend_on_where_a_text_is_cut
  a tag that is cut is not a tag | apps.serve.chats.answer_parser:AnswerParser._pass_to: 0 if self._is_last => 0 if True
"""

MUTANTS = read_table(TABLE)
