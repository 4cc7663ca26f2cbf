"""The traps of saved states; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

FIELDS = "tests/energon/test_fingerprint.py::"
EACH_FIELD = FIELDS + "test_a_state_is_refused_wherever_the_changed_setting_changes_the_stream"
EPOCHS = "tests/energon/test_drops.py::"
HOSTILE = "tests/energon/test_damaged_data.py::"
SHARDS = "tests/energon/test_damaged_data.py::"
STATES = "tests/energon/test_states.py::"
FILES = "tests/energon/test_states.py::"
RESUMED = "tests/conformance/test_resumed_state.py::"

GENERATORS = "tests/wan/test_global_generators.py::"
EARLY = "test_a_state_saved_before_the_first_pack_is_the_one_that_was_restored_or_the_beginning"
ENDS = "tests/energon/test_epoch_end.py::"
COST = "tests/energon/test_states.py::"

CHILD = "tests/media/test_decoding_process.py::"
STORAGE = "tests/energon/test_storage.py::"

STATE_TRAPS = {
    52: "data that were edited, reordered or swapped under equal counts are read on as if they were the old ones",
    55: "what a finite epoch drops after its last pack is reported nowhere, or an epoch without a pack ends well",
    56: "one record or one shard stops a run and each restart of it, without its name",
    190: "a worker or its decoding process grows over weeks until the machine has no memory left",
    208: "a loader grows with each sample that it has read, in the worker or in the rank",
    191: "good samples are quarantined for what the machine did to their decoder",
    65: "a decoder that hangs, crashes or is interrupted holds or ends the run, or spoils the next sample",
    53: "a state is changed by restoring it or by a later error, or is missing or damaged and the data begin anew",
    93: "the reading rank draws from a global random generator, which its tensor- and context-parallel peers share",
    94: "a run that is started again after its last step cannot save its state",
    95: "an epoch that one rank without a pack ends for all trains nothing and says nothing",
    102: "a worker collects garbage of the process that it was forked from, and crashes",
    96: "a state after every pack costs more than the pack, because long lists are copied item by item",
    192: "a storage that pauses costs samples, or one that stays away is told as bad data",
    193: "an error of an object store's client is taken for one of the sample, or ends the run at once",
    203: "how long a loader waits for its storage is decided by another loader, or not asked while it is opened",
}

STATE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=51,
        name="settings of the encoder count only where its own fingerprint has them",
        test=EACH_FIELD + "[encoder.max_source_pixels]",
        oracle="the stream of packs",
        edits=(("energon/task_encoder.py", '**settings_of("encoder", encoder.config)}', "}"),),
    ),
    Mutation(
        trap=51,
        name="the times that the data are shuffled through are taken for a setting of the loader's memory",
        test=EACH_FIELD + "[data.shuffle_over_epochs]",
        oracle="the stream of packs",
        edits=(
            (
                "config/run.py",
                'unit="epochs", changes="packs"',
                'unit="epochs", changes="nothing"',
            ),
        ),
    ),
    Mutation(
        trap=51,
        name="states from before a setting are refused, although the run has its default",
        test=FIELDS + "test_a_state_from_before_any_setting_but_the_oldest_is_accepted",
        oracle="the same state without the setting's name",
        edits=(("config/run.py", 'setting(False, changes="packs", newer=True)', 'setting(False, changes="packs")'),),
    ),
    Mutation(
        trap=53,
        name="a process ends while its thread lets go of the groups of ranks",
        test="tests/energon/test_packs_ahead.py::"
        "test_a_process_ends_after_its_thread_has_let_go_of_the_groups_of_ranks",
        oracle="the interpreter, which ends threads that come back too late",
        edits=(("energon/replica_reader.py", "for thread in [*_running, *channel.SENDING]:", "for thread in []:"),),
    ),
    Mutation(
        trap=53,
        name="a worker that an error ends stores a state in place of the last pack's",
        test=STATES + "test_an_error_in_a_pack_that_is_made_ahead_leaves_the_state_of_the_last_one_whole[1]",
        oracle="a run without the error",
        edits=(("energon/loader.py", "self._loader.dataset.__class__ = _WholePacks", "pass"),),
    ),
    Mutation(
        trap=51,
        name="rank 0's state restores on rank 1",
        test=STATES + "test_a_state_of_another_reader_is_refused_in_one_sentence",
        oracle="the definition",
        edits=(("energon/task_encoder.py", '{"rank": own.rank, "ranks"', '{"ranks"'),),
    ),
    Mutation(
        trap=51,
        name="every rank restores the first one's part of the states of all ranks",
        test=STATES + "test_a_loop_that_saves_and_restores_under_energons_names_goes_on_with_our_loader",
        oracle="the same loop on Energon's own loader",
        edits=(("energon/loader.py", "own = [state[self._rank]]", "own = [state[0]]"),),
    ),
    Mutation(
        trap=52,
        name="only the metadataset counts, not the data sets in it",
        test=STATES + "test_changed_data_beneath_equal_shard_counts_are_refused_by_name",
        oracle="the definition",
        edits=(("energon/data_identity.py", "yield from _walk(child, None, seen, named)", "yield from ()"),),
    ),
    Mutation(
        trap=52,
        name="shards count by their names and samples alone",
        test=STATES + "test_swapped_shards_of_a_data_set_are_refused",
        oracle="the definition",
        edits=(
            (
                "energon/data_identity.py",
                'shards.update(f"{shard}\\0{size}\\0".encode() + header)',
                "shards.update(shard.encode())",
            ),
        ),
    ),
    Mutation(
        trap=53,
        name="Energon goes on with the parts of the caller's state",
        test=STATES + "test_one_state_in_memory_can_be_restored_twice_and_saving_does_not_change_it",
        oracle="the run before the restore",
        edits=(
            (
                "energon/loader.py",
                'loaded = copied(state["loader"])',
                'loaded = state["loader"]',
            ),
        ),
    ),
    Mutation(
        trap=53,
        name="only errors of the unpickler tell a damaged file",
        test=FILES + "test_a_missing_an_empty_and_a_foreign_file_are_refused_by_name",
        oracle="the definition",
        edits=(("energon/states.py", "except Exception as error:  # damaged", "except EOFError as error:  # damaged"),),
    ),
    Mutation(
        trap=53,
        name="a run of Bridge that continues without a state begins its data anew",
        test=RESUMED + "test_a_run_that_continues_is_refused_where_no_state_would_be_restored",
        oracle="the definition",
        edits=(("bridge/provider.py", "if resumed is None or not resumed[0]:", "if True:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=55,
        name="the end of a worker's epoch carries no drops",
        test=EPOCHS + "test_everything_read_is_emitted_or_dropped_by_reason_in_every_epoch",
        oracle="the number of samples",
        edits=(("energon/window.py", "dropped=self.ledger.take_dropped(),", "dropped=(),"),),
    ),
    Mutation(
        trap=55,
        name="an epoch that made no pack ends as if it had",
        test=EPOCHS + "test_a_finite_run_that_makes_no_pack_ends_with_the_reason",
        oracle="the definition",
        edits=(("energon/loader.py", "if dropped or self._world_size == 1:", "if False:"),),
    ),
    Mutation(
        trap=56,
        name="memory that one sample lacks ends the run",
        test=HOSTILE + "test_no_exception_of_one_sample_ends_a_run",
        oracle="the definition",
        edits=(
            (
                "energon/window.py",
                "except (UserError, PackingError, internals.FatalSampleError):",
                "except (UserError, PackingError, internals.FatalSampleError, MemoryError):",
            ),
        ),
    ),
    Mutation(
        trap=56,
        name="a record is read to any depth",
        test=HOSTILE + "test_a_record_of_any_depth_costs_itself_and_is_named",
        oracle="the definition",
        edits=(("energon/cookers.py", "check_depth(text, record)", "pass"),),
    ),
    Mutation(
        trap=56,
        name="a shard that breaks off ends the run",
        test=SHARDS + "test_a_shard_that_breaks_off_costs_what_lies_after_and_each_is_named",
        oracle="the tar itself",
        edits=(("energon/loader.py", "guard_shards(dataset,", "(lambda *_, **__: None)(dataset,"),),
    ),
    Mutation(
        trap=65,
        name="a decoder may take for ever",
        test=CHILD + "test_a_decoder_that_hangs_is_ended_at_the_deadline_and_costs_its_sample",
        oracle="a decoder that hangs",
        edits=(
            (
                "media/decoding_process.py",
                "if not child.connection.poll(None if self._seconds is None else self._seconds + GRACE):",
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=65,
        name="a hanging decoder outlives its run",
        test=CHILD + "test_a_parent_that_is_killed_takes_its_child_along_even_within_a_decode[hang]",
        oracle="the kernel's list of processes",
        edits=(("media/decoding_process.py", ".prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)", ""),),
    ),
    Mutation(
        trap=65,
        name="the answer to a call that was interrupted is given to the next one",
        test=CHILD + "test_the_answer_to_a_call_that_was_interrupted_is_not_given_to_the_next_one",
        oracle="the bytes of the file",
        edits=(("media/decoding_process.py", "        self._asked = True\n", ""),),
    ),
    Mutation(
        trap=65,
        name="a listed sample is decoded again",
        test="tests/energon/test_damaged_data.py::test_each_costs_its_sample_and_the_next_run_skips_it_at_once",
        oracle="the run before",
        edits=(("energon/window.py", "if ledger.drop_quarantined(key, data, modality):", "if False:"),),
    ),
    Mutation(
        trap=192,
        name="a read gives a storage four tries in 2.1 s, and then its sample counts as bad",
        test=STORAGE + "test_a_storage_that_pauses_costs_no_sample_and_two_lines[ESTALE]",
        oracle="the packs of a storage that never failed",
        edits=(("errors.py", "_PATIENCE.get() if _is_away(error) else None", "None"),),
    ),
    Mutation(
        trap=192,
        name="the files of a file system that is not mounted count as gone",
        test=STORAGE + "test_a_file_that_is_gone_is_gone_and_a_directory_that_is_gone_is_waited_for",
        oracle="the file system",
        edits=(("errors.py", "return next(found, None) is None", "return False"),),
    ),
    Mutation(
        trap=192,
        name="media below a mount point in their store count as gone",
        test=STORAGE + "test_media_below_an_empty_mount_point_or_a_link_to_nowhere_are_waited_for[videos/a/b.mp4-True]",
        oracle="the file system",
        edits=(("energon/samples.py", 'abspath(root), file or "-")', 'abspath(root), "-")'),),
    ),
    Mutation(
        trap=192,
        name="samples of a process without descriptors count as bad",
        test=STORAGE + "test_a_process_without_descriptors_ends_and_drops_nothing",
        oracle="the definition",
        edits=(("errors.py", "if _PATIENCE.get() is not None and getattr(", "if False and getattr("),),
    ),
    Mutation(
        trap=192,
        name="media in a mount point that may not be listed are dropped while its file system is away",
        test=STORAGE
        + "test_media_in_a_directory_that_may_not_be_listed_are_waited_for_and_never_dropped[mnt/a.jpg-False]",
        oracle="the kernel",
        edits=(
            (
                "errors.py",
                "not isinstance(error, NotADirectoryError)",
                "not isinstance(error, NotADirectoryError | PermissionError)",
            ),
        ),
    ),
    Mutation(
        trap=192,
        name="a plan's data below a mount point without its file system count as moved",
        test="tests/offline/test_planned_storage.py::test_a_data_set_below_an_empty_mount_point_has_not_moved",
        oracle="the file system",
        edits=(("offline/source.py", "left != real and next(entries, None) is not None", "left != real"),),
    ),
    Mutation(
        trap=192,
        name="nobody says which directory is empty",
        test=STORAGE + "test_the_empty_directory_that_a_run_waited_for_is_named_with_what_to_do",
        oracle="the file system",
        edits=(("energon/samples.py", 'why = f"{place} {LOST}"', 'why = f"{error}"'),),
    ),
    Mutation(
        trap=192,
        name="a storage whose name begins with the root's is a directory below it",
        test=STORAGE
        + "test_a_dangling_link_is_judged_by_where_it_points_whatever_the_root_is_named[data_store/a.jpg-True-data]",
        oracle="the file system",
        edits=(("energon/samples.py", 'place.startswith(os.path.join(top, ""))', "place.startswith(top)"),),
    ),
    Mutation(
        trap=192,
        name="a mount point that goes with its mount ends the run at once",
        test="tests/offline/test_planned_storage.py::"
        "test_a_mount_point_that_goes_with_its_mount_is_waited_for_once_the_run_has_begun[polylithic-plan-0]",
        oracle="the file system",
        edits=(
            (
                "offline/source.py",
                "            return meta_text(root, file.name)",
                "            check_there([str(root)])\n            return meta_text(root, file.name)",
            ),
        ),
    ),
    Mutation(
        trap=192,
        name="a record of a linked directory that names no file stops the run",
        test=STORAGE
        + "test_media_below_an_empty_mount_point_or_a_link_to_nowhere_are_waited_for[system/nowhere/a.jpg-False]",
        oracle="the file system",
        edits=(("energon/samples.py", "    if os.path.exists(left):", "    if False:"),),
    ),
    Mutation(
        trap=192,
        name="a data set that a plan takes nothing of has to be there",
        test="tests/offline/test_planned_storage.py::"
        "test_a_data_set_that_a_plan_takes_nothing_of_may_be_gone[polylithic-plan-too long]",
        oracle="the packs of before",
        edits=(
            (
                "offline/plan.py",
                'it.get("rows", it["per_epoch"])',
                'it["per_epoch"]',
            ),
        ),
    ),
    Mutation(
        trap=203,
        name="media of packs that lie among the records of one data set of several are waited for when it moved",
        test="tests/wan/test_offline_clips.py::test_clips_that_moved_are_named_at_once[packs]",
        oracle="the file system",
        edits=(
            (
                "offline/plan.py",
                'told.get("rows_with_media", alone or each.media_root != each.root)',
                "each.media_root != each.root",
            ),
        ),
    ),
    Mutation(
        trap=203,
        name="clips count as samples without media",
        test="tests/wan/test_offline_clips.py::test_clips_that_moved_are_named_at_once[packs]",
        oracle="the file system",
        edits=(("offline/planner.py", "if text is None else times", "if True else times"),),
    ),
    Mutation(
        trap=203,
        name="media that truncation cuts off, which a plan's run looks at, are waited for when they moved",
        test="tests/offline/test_planned_storage.py::test_media_that_truncation_cuts_off_are_looked_for_only_where_they_"
        "are_looked_at",
        oracle="the file system",
        edits=(
            ("offline/plan.py", "            elif told.get(", "            if told.get("),
            ("offline/plan.py", "[each.root, each.media_root]", "[each.root]"),
        ),
    ),
    Mutation(
        trap=203,
        name="packs of an older plan with their media among the records are waited for when these moved",
        test="tests/offline/test_planned_storage.py::test_a_plan_that_does_not_count_its_rows_is_read_on",
        oracle="the file system",
        edits=(("offline/plan.py", "alone or each.media_root", "each.media_root"),),
    ),
    Mutation(
        trap=203,
        name="a plan of before data sets were summed up reads of none of them",
        test="tests/offline/test_planned_storage.py::test_a_plan_that_does_not_count_its_rows_is_read_on",
        oracle="the file system",
        edits=(("offline/plan.py", '[{"per_epoch": 1}] * len(self.datasets)', "()"),),
    ),
    Mutation(
        trap=192,
        name="packs that hold their media wait for a data set that they never read",
        test="tests/offline/test_planned_storage.py::"
        "test_packs_with_their_media_do_not_need_their_data_set_not_even_to_be_packed_again[polylithic-copy]",
        oracle="the packs of before",
        edits=(("offline/packed.py", "facts.roots(records=False) if elsewhere else []", "facts.roots(records=False)"),),
    ),
    Mutation(
        trap=203,
        name="a person waits for the media that packs refer to and that moved",
        test="tests/offline/test_planned_storage.py::test_a_data_set_that_moved_is_named_at_once[polylithic-packs-.-0]",
        oracle="the file system",
        edits=(("offline/loader.py", "    check_there(packs.roots())\n", ""),),
    ),
    Mutation(
        trap=192,
        name="a link into a mount point without its file system costs its sample",
        test=STORAGE + "test_the_empty_directory_that_a_run_waited_for_is_named_with_what_to_do",
        oracle="the file system",
        edits=(("energon/samples.py", 'why, f"{place}/{os.path.basename(name)}")', "why, error.filename)"),),
    ),
    Mutation(
        trap=192,
        name="SQLite, which is refused a descriptor, blames the storage",
        test=STORAGE + "test_an_index_that_lacks_a_descriptor_names_the_limit_and_no_storage",
        oracle="the kernel's limit",
        edits=(("errors.py", "                cause = limit\n", "                pass\n"),),
    ),
    Mutation(
        trap=192,
        name="a descriptor of an index that failed is asked again and again",
        test=STORAGE + "test_the_index_of_a_plan_s_media_is_opened_anew_after_an_error",
        oracle="the kernel",
        edits=(
            ("offline/source.py", '            vars(self).pop("_database", None)  # what', "            pass  # what"),
        ),
    ),
    Mutation(
        trap=203,
        name="a person waits for the data set of a plan that moved",
        test="tests/offline/test_planned_storage.py::test_a_data_set_that_moved_is_named_at_once[polylithic-plan-.-0]",
        oracle="the file system",
        edits=(("offline/source.py", "return left != real and next(entries, None) is not None", "return False"),),
    ),
    Mutation(
        trap=203,
        name="preview waits as long as a run",
        test="tests/offline/test_planned_storage.py::test_preview_does_not_wait_for_a_storage_that_is_away[polylithic-plan]",
        oracle="a clock",
        edits=(("cli/preview.py", '(*overrides, "data.storage_patience=0"))', "overrides)"),),
    ),
    Mutation(
        trap=192,
        name="sizes of media that are not mounted count as never stored",
        test=STORAGE + "test_sizes_of_media_that_are_not_mounted_are_waited_for_and_those_that_nobody_stored_are_not",
        oracle="the file system",
        edits=(("energon/cookers.py", "if os.path.isabs(root := ", "if False and (root := "),),
    ),
    Mutation(
        trap=192,
        name="the time of waiting for a storage counts as decoding",
        test=STORAGE + "test_waiting_is_no_decoding",
        oracle="the packs of a storage that never failed",
        edits=(
            ("encoders/encoder.py", "                found[name] = read(name)\n", "                pass\n"),
            ("encoders/encoder.py", "content := found[name]", "content := read(name)"),
        ),
    ),
    Mutation(
        trap=203,
        name="the loader that was built last decides how long all of the process wait",
        test=STORAGE + "test_each_of_two_loaders_waits_by_its_own_patience",
        oracle="the packs of a storage that never failed",
        edits=(
            ("energon/loader.py", "            with be_patient(self._patience):\n", "            if True:\n"),
            (
                "energon/loader.py",
                "    with be_patient(config.data.storage_patience):\n",
                "    be_patient(config.data.storage_patience)\n    if True:\n",
            ),
        ),
    ),
    Mutation(
        trap=192,
        name="a page of a large pack that cannot be read ends the worker",
        test="tests/offline/test_planned_storage.py::"
        "test_a_storage_that_goes_away_after_a_large_pack_was_read_does_not_end_the_process",
        oracle="the kernel",
        edits=(
            (
                "offline/shards.py",
                "            left = buffer = memoryview(np.empty(end - begin, np.uint8))",
                "            import mmap\n"
                "            return memoryview(mmap.mmap(self._open(), end, mmap.MAP_PRIVATE))[begin:]",
            ),
        ),
    ),
    Mutation(
        trap=203,
        name="a run that begins while its storage is away ends after 2.1 s",
        test=STORAGE + "test_a_run_that_begins_while_its_storage_is_away_waits_and_one_with_a_wrong_name_does_not",
        oracle="the packs of a storage that never failed",
        edits=(("energon/loader.py", "with be_patient(config.data.storage_patience):", "with be_patient(None):"),),
    ),
    Mutation(
        trap=193,
        name="the client's error for a 503 is not tried again",
        test=STORAGE + "test_errors_of_other_libraries_become_the_system_s_and_others_stay",
        oracle="the client's own class",
        edits=(("errors.py", ' or type(error).__name__ == "RetryableError"', ""),),
    ),
    Mutation(
        trap=191,
        name="the eighth sample in a row has one try",
        test=CHILD + "test_the_last_sample_before_a_stop_is_tried_once_more_too",
        oracle="the bytes of the file",
        edits=(("media/decoding_process.py", " or not (self._again or reason == CRASH)", ""),),
    ),
    Mutation(
        trap=190,
        name="a child keeps freed memory for good, as its parent does",
        test=CHILD + "test_a_child_of_a_process_that_keeps_freed_memory_returns_it_after_some_samples",
        oracle="the kernel's account of private memory",
        edits=(("media/decoding_process.py", "            trim(0)\n", ""),),
    ),
    Mutation(
        trap=190,
        name="a child that grows is never renewed",
        test=CHILD + "test_a_child_that_grows_is_renewed_and_no_answer_is_lost",
        oracle="the definition",
        edits=(
            (
                "media/decoding_process.py",
                "        if has_grown and not torch.cuda.is_initialized():\n            self.close()\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=208,
        name="open tars keep every member that was read",
        test="tests/energon/test_workers.py::test_nothing_that_a_loader_holds_grows_with_the_samples_that_it_has_read",
        oracle="Python's garbage collector",
        edits=(("energon/samples.py", "        tar.members.clear()\n", "        pass\n"),),
    ),
    Mutation(
        trap=208,
        name="a worker never returns freed memory",
        test="tests/energon/test_workers.py::test_a_worker_that_keeps_freed_memory_returns_it_at_times[0.1-20.0-True]",
        oracle="the kernel's account of private memory",
        edits=(("energon/workers.py", "        trim(0)\n", "        pass\n"),),
    ),
    Mutation(
        trap=191,
        name="a first time-out is proof where it cannot be tried again",
        test=CHILD + "test_a_first_time_out_that_is_not_tried_again_proves_nothing",
        oracle="the definition",
        edits=(("media/decoding_process.py", "raise SampleRejected(ENDED, error.detail) from error", "raise"),),
    ),
    Mutation(
        trap=191,
        name="a child that the memory killer ended condemns its sample",
        test=CHILD + "test_what_proves_nothing_about_a_sample_is_tried_once_more_in_a_new_child[killed-True]",
        oracle="the kernel, which ends the child once",
        edits=(("media/decoding_process.py", "if error.reason not in (TIMEOUT, ENDED):", "if True:"),),
    ),
    Mutation(
        trap=191,
        name="a sample whose decoder was killed is in quarantine",
        test=CHILD + "test_a_decoder_that_crashes_costs_its_sample_and_the_cause_is_named[killed-"
        "SIGKILL, as where memory runs out; lower data.workers-decoder_ended]",
        oracle="the signal that ended the child",
        edits=(
            (
                "media/decoding_process.py",
                "reason = CRASH if os.WTERMSIG(status) in _FAULTS else ENDED",
                "reason = CRASH",
            ),
        ),
    ),
    Mutation(
        trap=191,
        name="what was released stays in quarantine",
        test="tests/test_ledger_report.py::"
        "test_what_is_in_quarantine_is_listed_and_released_by_key_while_a_run_goes_on",
        oracle="the keys that were released",
        edits=(("ledger.py", 'if "released" in entry:', "if False:"),),
    ),
    Mutation(
        trap=93,
        name="torch seeds the workers of a data set from the global generator",
        test=GENERATORS + "test_no_call_of_a_loader_changes_a_global_generator_on_any_rank[conversations]",
        oracle="the generators before the call",
        edits=(("energon/loader.py", "self._loader.generator = torch.Generator()", "pass"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=93,
        name="torch seeds the workers of a plan from the global generator",
        test=GENERATORS + "test_no_call_of_a_loader_changes_a_global_generator_on_any_rank[conversations]",
        oracle="the generators before the call",
        edits=(("offline/loader.py", "generator=torch.Generator(),", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=93,
        name="the ranks of a replica draw other times for Wan",
        test=GENERATORS + "test_all_ranks_of_a_replica_draw_the_times_of_wan_from_the_same_distributions[clips]",
        oracle="`sample_timesteps` of Bridge on the other ranks",
        edits=(("energon/loader.py", "self._loader.generator = torch.Generator()", "torch.rand(1)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=94,
        name="a worker that has not begun is believed to have a pack to skip",
        test="tests/energon/test_loader.py::test_a_state_that_is_asked_for_while_a_worker_begins_continues_exactly",
        oracle="the run that was not interrupted",
        edits=(
            (
                "energon/loader.py",
                "functools.partial(_state_of_rank, loader, self._patience)",
                "loader.save_state_rank",
            ),
        ),
    ),
    Mutation(
        trap=94,
        name="a restored loader saves the beginning until its first pack",
        test="tests/energon/test_loader.py::" + EARLY + "[0]",
        oracle="the run that was not interrupted",
        edits=(("energon/loader.py", "return copied(self._restored)", "pass"),),
    ),
    Mutation(
        trap=94,
        name="a loader without a pack has no state",
        test=RESUMED + "test_a_run_of_bridge_goes_on_with_its_state_and_is_stopped_without_it",
        oracle="Bridge's run that was not interrupted",
        edits=(("energon/loader.py", "return copied(self._restored)", 'raise PackingError("read a pack first")'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=102,
        name="what only a cycle of the training process holds is left for the workers to collect",
        test="tests/energon/test_workers.py::"
        "test_what_only_a_cycle_holds_ends_before_the_workers_start_and_not_in_them[online]",
        oracle="Python's garbage collector",
        edits=(("energon/workers.py", "        gc.collect()\n", "        pass\n"),),
    ),
    Mutation(
        trap=95,
        name="an epoch without a step ends well on all ranks",
        test=ENDS + "test_an_epoch_in_which_no_rank_would_emit_a_pack_is_refused_by_all_with_the_rank_that_has_none",
        oracle="the definition",
        edits=(("energon/epoch_end.py", "if report.agreements == 1:", "if False:"),),
    ),
    Mutation(
        trap=95,
        name="a run that was restored at the end of its epoch is refused",
        test=ENDS + "test_an_epoch_in_which_no_rank_would_emit_a_pack_is_refused_by_all_with_the_rank_that_has_none",
        oracle="the definition",
        edits=(("energon/epoch_end.py", "if pack is None and not resumed", "if pack is None"),),
    ),
    Mutation(
        trap=94,
        name="the clean-up of Bridge takes states for checkpoints",
        test="tests/conformance/test_resumed_state.py::"
        "test_bridges_clean_up_leaves_the_checkpoint_of_the_model_and_its_state",
        oracle="Bridge's own clean-up",
        edits=(("bridge/provider.py", 'STATES = "step_"', 'STATES = "iter_"'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=94,
        name="states in a folder that the run names are left to Bridge",
        test=RESUMED + "test_bridges_clean_up_leaves_the_checkpoint_of_the_model_and_its_state[states]",
        oracle="Bridge's own clean-up",
        edits=(("bridge/provider.py", "or not place or", "or config.dataset.dataloader_save or not place or"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=51,
        name="an encoder of one's own is changed and the state is restored",
        test="tests/conformance/test_in_batch_mode.py::"
        "test_an_encoder_of_the_users_own_makes_the_rows_of_a_data_set_that_names_it[packs]",
        oracle="the definition",
        edits=(("bridge/dataset.py", "data_fingerprint(config) | named", "data_fingerprint(config)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=53,
        name="a run with more ranks is not told how many there were",
        test="tests/conformance/test_resumed_state.py::test_a_run_with_more_ranks_names_both_numbers_and_the_way_out",
        oracle="the definition",
        edits=(("bridge/provider.py", "if saved := len(", "if saved := 0 * len("),),
        needs_bridge=True,
    ),
    Mutation(
        trap=96,
        name="Energon copies what it saves item by item",
        test=COST + "test_a_state_takes_as_few_steps_at_any_size[buffer of 2,000]",
        oracle="the definition",
        edits=(("energon/loader.py", "    save_shallowly(dataset)\n", ""),),
    ),
    Mutation(
        trap=96,
        name="a state goes on changing with the shuffle buffer",
        test=COST + "test_a_state_is_the_one_that_energon_saves_and_does_not_change_with_the_loader[slices]",
        oracle="Energon's own `save_state`",
        edits=(
            (
                "energon/states.py",
                "_restore_keys=list(value._restore_keys)",
                "_restore_keys=value._restore_keys",
            ),
        ),
    ),
)
