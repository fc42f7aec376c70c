"""What has been wrong once, or was noticed by no test: a mistake to be made again, and its test."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """``right``, a text that is in ``file`` once, becomes ``wrong``; then ``test`` has to fail.

    ``case`` is what a user would meet, ``what`` the mistake in a few words."""

    case: str
    what: str
    file: str
    right: str
    wrong: str
    test: str


AXES = "unit/capture/test_sample_axes.py"
FOLLOWING = "unit/kfac/test_following.py"
PASSES = "unit/capture/test_passes.py"
INNER = "unit/capture/test_inner_uses.py"
RANKS = "distributed/test_changing_models.py"
FOLDERS = "unit/comm/test_damaged_checkpoints.py"
STATES = "unit/lab/train/test_state.py"
NUMERICS = "unit/inverses/test_numerics.py"

MISTAKES = (
    # The axis of the samples.
    Mistake(
        "axis order inside a model",
        "the first axis is taken for the samples'",
        "capture/sample_axes.py",
        "if len(exact) == 1 and not folded:",
        "if False:",
        f"{AXES}::test_axes_that_were_turned_by_hand",
    ),
    Mistake(
        "axis order inside a model",
        "torch's encoders are taken for batch-first",
        "capture/sample_axes.py",
        "axis = 0 if module.self_attn.batch_first else 1",
        "axis = 0",
        f"{AXES}::test_an_encoder_with_tokens_in_front",
    ),
    Mistake(
        "axis order inside a model",
        "a doubt is not told",
        "capture/sample_axes.py",
        "if sizes[usual] != samples:",
        "if False:",
        f"{AXES}::test_a_doubt_is_told_and_the_user_decides",
    ),
    # A model that changes.
    Mistake(
        "unfreezing",
        "`requires_grad` is not looked at",
        "capture/changes.py",
        "now.requires_grad is not trained",
        "False",
        f"{FOLLOWING}::test_a_changed_layer_has_the_block_of_a_new_kfac",
    ),
    Mistake(
        "unfreezing on plain ranks",
        "gradients of what was unfrozen are not averaged",
        "kfac/following.py",
        "gradients.follow(self.model.parameters())\n",
        "gradients.follow(gradients.parameters)\n",
        f"{RANKS}::test_what_is_excluded_and_replaced_is_averaged",
    ),
    Mistake(
        "a parameter that is replaced",
        "the object is not looked at",
        "capture/changes.py",
        "(now is not p and not is_sharded(p))",
        "False",
        f"{FOLLOWING}::test_a_changed_layer_has_the_block_of_a_new_kfac",
    ),
    Mistake(
        "a parameter that is resized",
        "the shape is not looked at",
        "capture/changes.py",
        "or p.shape != shape",
        "or False",
        f"{FOLLOWING}::test_a_changed_layer_has_the_block_of_a_new_kfac",
    ),
    Mistake(
        "a parameter that is pruned",
        "a weight that is computed from another one counts as the same",
        "capture/changes.py",
        "if path != paths.get(p, path):",
        "if False:",
        f"{FOLLOWING}::TestWithoutBlock::test_a_pruned_weight_is_told_of",
    ),
    Mistake(
        "a weight that is frozen later",
        "its block stays, and preconditions neither it nor its bias",
        "capture/changes.py",
        'return "" if p.requires_grad else "frozen"',
        'return ""',
        f"{FOLLOWING}::test_a_changed_layer_has_the_block_of_a_new_kfac",
    ),
    Mistake(
        "layers changed on some ranks only",
        "ranks do not compare how they have changed",
        "kfac/ranks/team.py",
        "if self.counted(squares) * self.size != self.counted(digests) ** 2:",
        "if False:",
        f"{RANKS}::test_a_change_on_one_rank_alone_is_refused_by_all",
    ),
    # Weights in flat buffers.
    Mistake(
        "attention over flat buffers",
        "rows are counted from the beginning of the storage",
        "layers/attention.py",
        "(weight.storage_offset() - source.storage_offset())",
        "weight.storage_offset()",
        "unit/layers/test_attention.py::test_a_weight_in_a_flat_buffer",
    ),
    # How many samples there are.
    Mistake(
        "parts of a model, in micro-batches",
        "all of them are one pass",
        "capture/hooks.py",
        "if this is None or not (again or self.inside or this.fits(rows)):",
        "if this is None:",
        f"{PASSES}::TestParts::test_micro_batches_of_parts",
    ),
    Mistake(
        "parts of a model, and evaluations",
        "an evaluation takes the place of what comes",
        "capture/hooks.py",
        "self.current = self._before  # an evaluation is no part of what comes",
        "pass",
        f"{PASSES}::TestParts::test_micro_batches_of_parts",
    ),
    Mistake(
        "parts of a model with several sizes",
        "no warning",
        "capture/passes.py",
        "if len(self.seen) > 1 or several:",
        "if False:",
        f"{PASSES}::TestParts::test_several_sizes_are_told_of",
    ),
    Mistake(
        "`model(t, x)`",
        "a time step counts as the batch",
        "capture/passes.py",
        "if first == 1 or self.listed:",
        "if self.listed:",
        f"{PASSES}::TestSizes::test_a_time_before_the_samples",
    ),
    Mistake(
        "`model([a, b])`",
        "the length of the list counts",
        "capture/passes.py",
        "if first == 1 or self.listed:",
        "if first == 1:",
        f"{PASSES}::TestSizes::test_a_list_of_inputs",
    ),
    Mistake(
        "a `PackedSequence` given to the model",
        "those that are left at the last step are counted",
        "capture/passes.py",
        "value.batch_sizes[0]",
        "value.batch_sizes[-1]",
        f"{PASSES}::TestSizes::test_what_may_be_the_number_of_samples",
    ),
    Mistake(
        "samples on a second axis",
        "a tensor without positions is turned, too",
        "layers/base.py",
        "if self.batch_axis and t.ndim > features + self.batch_axis:",
        "if self.batch_axis and t.ndim >= features + self.batch_axis:",
        f"{AXES}::test_samples_of_a_second_axis_come_first_if_there_is_one",
    ),
    Mistake(
        "`model(x)` of one sample without an axis",
        "its features are taken for samples",
        "capture/passes.py",
        "self.place, self.samples = ALONE, 1",
        "pass",
        f"{PASSES}::TestSamplesWithoutAnAxis::test_it_is_one",
    ),
    Mistake(
        "`model(t, x)` between updates, of a sum",
        "what layers have shown is forgotten",
        "capture/hooks.py",
        "self.place = this.place if this.seen else self.place",
        "pass",
        f"{PASSES}::TestSizes::test_the_size_that_layers_bore_out_holds_between_updates",
    ),
    Mistake(
        "one model in two threads at once",
        "not noticed",
        "capture/passes.py",
        "            self.crossed = CROSSED\n",
        "            pass\n",
        f"{PASSES}::TestThreads::test_a_model_that_is_called_in_two_threads_at_once_is_refused",
    ),
    # Backward passes.
    Mistake(
        "several backward passes over one graph",
        "each is squared by itself",
        "capture/tensor_hooks.py",
        "if torch._C._autograd._get_current_graph_task_keep_graph():",
        "if False:",
        f"{PASSES}::TestBackwards::test_two_losses_on_one_graph",
    ),
    Mistake(
        "a gradient penalty",
        "uses of weights in gradients are not looked for",
        "capture/tensor_hooks.py",
        "            follow(self.capture, self.use, self.this, g, self.view)\n            return\n",
        "            return\n",
        f"{INNER}::TestRight::test_a_gradient_penalty",
    ),
    Mistake(
        "a gradient penalty through other layers",
        "not refused",
        "capture/hooks.py",
        "if why := self.threads.crossed or self.second_order:",
        "if why := self.threads.crossed:",
        f"{INNER}::TestRefused::test_a_layer_that_is_not_linear",
    ),
    Mistake(
        "a backward pass that has failed",
        "it counts",
        "capture/backwards.py",
        "            self.failed = True\n",
        "            pass\n",
        f"{PASSES}::TestBackwards::test_a_backward_pass_that_failed_and_is_done_again",
    ),
    Mistake(
        "gradients set to zero between two passes",
        "what was seen before counts",
        "capture/backwards.py",
        "return all(p.grad is None or not bool(p.grad.any()) for p in self.parameters)",
        "return False",
        f"{PASSES}::TestBackwards::test_gradients_that_were_set_to_zero",
    ),
    Mistake(
        "a teacher by `functional_call`",
        "its weights are taken for new ones of the model",
        "capture/changes.py",
        "if now is not None and not isinstance(now, nn.Parameter):",
        "if False:",
        f"{INNER}::TestTeachers::test_they_change_nothing",
    ),
    Mistake(
        "weights that are computed from the model's own",
        "their gradients count as those of its own",
        "capture/inner_uses.py",
        "if lends(use[1].module):",
        "if False:",
        f"{INNER}::TestRefused::test_weights_that_are_computed_from_its_own",
    ),
    Mistake(
        "micro-batches of residuals, or a factor in front of them",
        "the curvature has weight 1",
        "kfac/residuals.py",
        "terms /= sum(weights)",
        "pass",
        "unit/kfac/test_residuals.py::TestTerms::"
        "test_a_factor_in_front_of_the_loss_is_one_of_the_curvature",
    ),
    # Copies and optimizers.
    Mistake(
        "two optimizers that step in turn",
        "gradients of the other one are preconditioned twice, without a word",
        "kfac/attaching.py",
        "if any(one.added for one in self._watched):",
        "if False:",
        "unit/kfac/test_attaching.py::"
        "test_gradients_of_the_other_optimizer_that_were_not_zeroed_are_told_of",
    ),
    Mistake(
        "`kfac` copied alone",
        "it does nothing, without a word",
        "kfac/attaching.py",
        "if copied and not self.gradients.any_here():",
        "if False:",
        "test_robustness.py::TestCopies::test_a_kfac_that_is_copied_alone_is_told_of",
    ),
    Mistake(
        "`LeastSquares` and layers that were replaced",
        "they are not trained",
        "least_squares.py",
        "        if self.kfac.following.changes.found():\n",
        "        if False:\n",
        "unit/test_least_squares.py::test_what_the_model_has_now_is_trained",
    ),
    Mistake(
        "copies of model, optimizer and `kfac`",
        "the clip asks for the parameters of the original",
        "kfac/clipping.py",
        "if self._parameters != parameters:",
        "if not self._parameters:",
        "unit/kfac/test_clipping.py::test_a_copy_whose_learning_rate_changes_is_clipped_by_it",
    ),
    Mistake(
        "`kfac.optimizer = other`",
        "ignored",
        "kfac/following.py",
        "        self.rates.optimizers = tuple(optimizers)\n",
        "",
        "unit/kfac/test_clipping.py::TestAnotherOptimizer::test_it_is_asked_from_then_on",
    ),
    Mistake(
        "a parameter put into a group",
        "groups are compared by their length in parameters of the first",
        "kfac/clipping.py",
        "if self._parameters != parameters:",
        "if len(self._parameters) != len(parameters):",
        "unit/kfac/test_clipping.py::TestLearningRates::"
        "test_a_parameter_put_into_a_group_has_its_rate",
    ),
    # Checkpoints.
    Mistake(
        "a damaged folder",
        "it is read into the model itself",
        "comm/checkpoints.py",
        "beside = _beside(state)",
        "beside = state",
        f"{FOLDERS}::test_damage_is_refused_and_changes_nothing",
    ),
    Mistake(
        "a damaged folder",
        "checksums are not compared",
        "comm/checksums.py",
        "if digests([folder / name])[name] != written[name]:",
        "if False:",
        f"{FOLDERS}::test_damage_is_refused_and_changes_nothing",
    ),
    Mistake(
        "a state with numbers that are not finite",
        "loaded",
        "kfac/state/validation.py",
        "if not bool(largest.isfinite()):",
        "if False:",
        "test_state.py::TestRefused::test_a_damaged_state",
    ),
    Mistake(
        "a hostile table of contents",
        "it names what it likes",
        "comm/plain_reading.py",
        'raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")',
        "return super().find_class(module, name)",
        f"{FOLDERS}::test_no_code_of_a_folder_is_run",
    ),
    Mistake(
        "hostile values",
        "pickles are run",
        "comm/plain_reading.py",
        "torch.load(value, weights_only=True)  # which",
        "pass  # which",
        f"{FOLDERS}::test_no_code_of_a_folder_is_run",
    ),
    Mistake(
        "a table that leads out of the folder",
        "followed",
        "comm/plain_reading.py",
        "if not isinstance(path, str) or PurePath(path).name != path:",
        "if not isinstance(path, str):",
        f"{FOLDERS}::test_a_table_that_leads_out_of_the_folder",
    ),
    Mistake(
        "power failure while saving",
        "the new folder is not flushed before the last one goes",
        "comm/checkpoints.py",
        "        checksums.flush(self.unfinished)\n",
        "",
        f"{FOLDERS}::test_all_is_on_the_disk_before_the_last_one_goes",
    ),
    Mistake(
        "damaged checkpoints of `natgrad train`",
        "checksums are not compared",
        "lab/train/state.py",
        "        checksums.verify(folder)\n",
        "",
        f"{STATES}::test_damage_anywhere_gives_way_to_the_one_before",
    ),
    Mistake(
        "damaged checkpoints of `natgrad train`",
        "a traceback for what is no state",
        "lab/train/state.py",
        'if not isinstance(state, dict) or not {"format", "step"} <= state.keys():',
        "if False:",
        f"{STATES}::test_one_without_checksums_that_is_no_state",
    ),
    Mistake(
        "damaged lines of a log",
        "a traceback",
        "lab/train/logs.py",
        'if isinstance(line, dict) and type(line.get("step")) is int and "kind" in line:',
        "if isinstance(line, dict):",
        "unit/lab/train/test_logs.py::test_lines_that_are_none_are_left_out",
    ),
    Mistake(
        "two `natgrad train` in one folder",
        "both go on",
        "lab/train/run_lock.py",
        "            if not free:\n",
        "            if False:\n",
        "unit/lab/train/test_run_lock.py::test_the_owner_is_named",
    ),
    Mistake(
        "a lock that a killed run left",
        "it stops everybody where there are no locks",
        "lab/train/run_lock.py",
        "    except ProcessLookupError:\n        return True\n",
        "    except ProcessLookupError:\n        return False\n",
        "unit/lab/train/test_run_lock.py::test_where_the_file_system_has_no_locks",
    ),
    Mistake(
        "gzip files that would fill the memory",
        "read to their end",
        "lab/data/files.py",
        "data = bytearray(file.read(most + 1))",
        "data = bytearray(file.read())",
        "unit/lab/data/test_files.py::test_a_file_that_would_fill_the_memory",
    ),
    # Ranks.
    Mistake(
        "EKFAC on few samples",
        "the basis of a null space is any",
        "linalg/eigh.py",
        "if count < 2:",
        "if True:",
        "unit/structures/test_ekfac.py::test_the_order_of_samples_does_not_matter",
    ),
    Mistake(
        "sparse gradients on plain ranks",
        "they are dense afterwards",
        "kfac/ranks/gradients.py",
        "p.grad = part.view_as(p).to(p.dtype).to_sparse(1)",
        "p.grad = part.view_as(p).to(p.dtype)",
        f"{RANKS}::test_what_is_excluded_and_replaced_is_averaged",
    ),
    Mistake(
        "16 bits on the wire",
        "who has made a gradient keeps what it has not rounded",
        "kfac/ranks/gradients.py",
        "if block.name in sent and self._rounds:",
        "if False:",
        "distributed/test_wire.py::test_short_inverses_and_gradients_are_the_same_on_all_ranks",
    ),
    Mistake(
        "`observe` after another forward pass",
        "its sentence names another cause",
        "kfac/observation.py",
        "observe() was given an output that is not of the model's last forward pass: call ",
        "observe() was called but no layer of the model was: call ",
        f"{PASSES}::TestBackwards::test_observed_after_another_forward_pass",
    ),
    Mistake(
        "two trainings in two threads",
        "they share scratch memory",
        "linalg/workspace.py",
        "class _Scratch(threading.local):",
        "class _Scratch:",
        "test_threads.py::test_a_thread_has_buffers_of_its_own",
    ),
    # Numerics.
    Mistake(
        "the KL clip of a sum loss",
        "`gradient_scale` is not squared",
        "kfac/apply.py",
        "kl_scale(dots.sum() * scale**2, clip)",
        "kl_scale(dots.sum() * scale, clip)",
        "unit/kfac/test_clipping.py::test_the_clip_of_a_sum_is_that_of_the_mean",
    ),
    Mistake(
        "eigenvalues below zero",
        "`Eigen` keeps them",
        "inverses/eigen.py",
        "values.clamp_(min=0.0)",
        "values",
        f"{NUMERICS}::test_eigenvalues_below_zero_are_zero",
    ),
    Mistake(
        "a block without damping",
        "the floor is that of its smallest eigenvalue",
        "inverses/functions.py",
        "floored(found, everything.flatten(1).amax(1))",
        "floored(found, everything.flatten(1).amin(1))",
        f"{NUMERICS}::test_a_kronecker_product_without_damping_has_the_floor_of_its_largest_product",
    ),
    Mistake(
        "`Drift()` on grouped factors",
        "Cholesky's error grows with their number",
        "inverses/base.py",
        "left.norm() / (left.shape[0] * left.shape[1]) ** 0.5",
        "left.norm() / left.shape[1] ** 0.5",
        f"{NUMERICS}::test_the_lag_of_a_stack_is_a_mean_over_its_matrices",
    ),
    Mistake(
        "Levenberg and Marquardt's threshold",
        "0.2 for 1/4",
        "schedules/trust_region.py",
        "elif not ratio >= 0.25:",
        "elif not ratio >= 0.2:",
        "unit/test_schedules.py::"
        "test_levenberg_marquardt_moves_beyond_a_quarter_and_three_quarters",
    ),
)
