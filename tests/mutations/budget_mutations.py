"""The traps of images and clips that decode to nothing useful, and of the drop budget; see `mutation_table`."""

from mutation_table import Mutation

BUDGET_TRAPS: dict[int, str] = {
    31: "a saved state belongs to another pack than the last one used",
    64: "ranks on another host wait for ever for the end of the data, since a rank of the reader's host has left",
    37: "pixels become other numbers, a turned TIFF or a one-frame clip is lost without its reason",
    54: "the drop budget forgets what is still held, or asks before the share is certain",
    57: "a half-written line of the ledger is joined to the next, or a key without UTF-8 ends the run",
    68: "a default limit made for one policy drops ordinary visual question answering, and nobody is told",
    194: "the drop budget counts each reader by itself, or forgives what is bad now for what was good long ago",
    204: "drops of ranks are mixed where one loads more than another, stay in their store, or end it with a trace",
    205: "counts of two spans or samples of two data sets are mixed, or the counting ends a run",
    195: "a sample that is dropped while a state is restored is in no report",
    196: "a ledger counts readers of an earlier run in the same place, or packs of a state that nobody went on from",
}

DEPTH = "tests/media/test_image_depth.py::"
LOADER = "tests/energon/test_drops.py::"
SAMPLES = "NumPy on the samples written into the file"
PIXELS = "tests/thd/test_pixels.py::"
FREQUENT = "tests/energon/test_drops.py::"
AHEAD = "tests/energon/test_packs_ahead.py::"

BUDGET_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=37,
        name="a PGM of more than 8 bits is clipped",
        test=DEPTH + "test_a_pgm_is_scaled_by_its_maxval",
        oracle=SAMPLES,
        edits=(
            (
                "media/probe.py",
                "        white = 65535.0\n",
                "        white = 0.0\n",
            ),
        ),
    ),
    Mutation(
        trap=37,
        name="twelve bits of a TIFF are taken for sixteen",
        test=DEPTH + "test_twelve_bits_of_a_tiff_are_not_taken_for_sixteen",
        oracle=SAMPLES,
        edits=(("media/probe.py", "int(tags.get(_BITS_PER_SAMPLE, (16,))[0])", "16"),),
    ),
    Mutation(
        trap=37,
        name="a float image is clipped to black",
        test=DEPTH + "test_floats_from_0_to_1_are_black_to_white",
        oracle=SAMPLES,
        edits=(("media/probe.py", '{"F": 1.0, "I": None}', '{"F": 0.0, "I": None}'),),
    ),
    Mutation(
        trap=37,
        name="32-bit integers pass as white",
        test=DEPTH + "test_integers_without_a_defined_white_are_refused_from_the_header",
        oracle="TIFF 6.0",
        edits=(("media/probe.py", '"I": None}', '"I": 0.0}'),),
    ),
    Mutation(
        trap=37,
        name="the size of a turned TIFF is turned twice",
        test="tests/media/test_image_orientation.py::"
        "test_an_image_is_upright_and_of_its_measured_size_in_every_orientation[TIFF-6]",
        oracle="the stored pixels, turned with NumPy",
        edits=(
            (
                "media/probe.py",
                "stored_width, stored_height = _stored_size(image)",
                "stored_width, stored_height = image.size",
            ),
        ),
    ),
    Mutation(
        trap=37,
        name="a one-frame clip is refused for a division by zero",
        test="tests/families/test_short_clips.py::"
        "test_a_short_clip_is_planned_as_its_processor_samples_it_or_refused_by_name[qwen2_5_vl-1-2.0]",
        oracle="the video processor of Hugging Face",
        edits=(
            (
                "families/qwen_vl.py",
                "        except (ZeroDivisionError, ValueError) as error:\n",
                "        except KeyError as error:\n",
            ),
        ),
    ),
    Mutation(
        trap=54,
        name="samples held in the window are not counted",
        test=LOADER + "test_no_run_below_its_budget_is_stopped_whatever_its_window[0.06-1024-measure]",
        oracle="simulated runs of a known share",
        edits=(
            (
                "ledger.py",
                "counted, read = unwished(self.reasons, self.read)",
                "counted, read = unwished(self.reasons, self.dropped + self.emitted)",
            ),
        ),
    ),
    Mutation(
        trap=54,
        name="a share above the budget by chance stops the run",
        test="tests/test_drop_budget.py::test_a_share_within_the_budget_is_never_stopped",
        oracle="the exact probability over all runs",
        edits=(
            (
                "drops.py",
                "return evidence >= math.log(looks / FALSE_STOP)\n",
                "return True\n",
            ),
        ),
    ),
    Mutation(
        trap=54,
        name="a run far above its budget goes on",
        test="tests/test_drop_budget.py::test_a_share_above_the_budget_is_stopped_within_the_stated_number_of_reads",
        oracle="the exact probability over all runs",
        edits=(
            (
                "drops.py",
                "return evidence >= math.log(looks / FALSE_STOP)\n",
                "return evidence >= 3 * math.log(looks / FALSE_STOP)\n",
            ),
        ),
    ),
    Mutation(
        trap=54,
        name="a restart forgets what was read and dropped",
        test=LOADER + "test_a_restored_run_counts_nothing_twice_and_forgets_nothing[None]",
        oracle="the run that was never stopped",
        edits=(
            (
                "energon/window.py",
                'self.ledger.resume(self._restored.get("counts"), held=',
                "self.ledger.resume(None, held=",
            ),
        ),
    ),
    Mutation(
        trap=54,
        name="samples of a buffer are counted when they leave it",
        test=LOADER + "test_every_sample_of_an_epoch_is_counted_as_read_once[16]",
        oracle="the keys of the data set",
        edits=(
            (
                "energon/window.py",
                "            self.ledger.count_read(data_of(sample), sample.modality)\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=68,
        name="a default limit made for one policy drops ordinary visual question answering",
        test=FREQUENT + "test_one_word_answers_to_photos_are_trained_as_the_processor_writes_them",
        oracle="the answers of the source, decoded by the processor's tokenizer",
        edits=(("config/encoder.py", 'setting(0.0, unit="share, 0 to 1")', 'setting(1 / 256, unit="share, 0 to 1")'),),
    ),
    Mutation(
        trap=68,
        name="a reason that drops a modality is not told",
        test=FREQUENT + "test_a_reason_that_drops_all_of_a_rare_modality_is_told",
        oracle="the images of the source",
        edits=(("drops.py", 'for modality in ("", *by_modality):', 'for modality in ("",):'),),
    ),
    Mutation(
        trap=68,
        name="the row of a dropped sample in an index does not say what it held",
        test=FREQUENT + "test_an_index_knows_the_modality_of_what_was_dropped",
        oracle="the images of the source",
        edits=(
            (
                "offline/measure.py",
                'if (conversation := getattr(sample, "conversation", None)) is not None:',
                "if (conversation := None) is not None:",
            ),
        ),
    ),
    Mutation(
        trap=68,
        name="every rank tells the same",
        test=FREQUENT + "test_of_all_ranks_the_first_one_tells",
        oracle="the warnings of two ranks, counted",
        edits=(("energon/loader.py", "{name: 1})[name] == 1", "{name: 1})[name] >= 1"),),
    ),
    Mutation(
        trap=57,
        name="a line that was cut off is joined to the next",
        test="tests/test_ledger.py::test_a_line_that_a_kill_cut_off_spoils_no_other",
        oracle="Python's json, line by line",
        edits=(("line_file.py", 'self._set_aside(path.with_suffix(".cut"))', "pass"),),
    ),
    Mutation(
        trap=57,
        name="a line that is being written is read before its end, and never again",
        test="tests/test_metrics_report.py::test_an_unfinished_line_waits_and_a_file_that_was_replaced_is_read_anew",
        oracle="the lines that were written",
        edits=(("line_file.py", 'end = data.rfind(b"\\n") + 1', "end = len(data)"),),
    ),
    Mutation(
        trap=57,
        name="half of a surrogate pair in a key ends the run",
        test="tests/test_ledger.py::test_odd_keys_come_out_of_the_file_as_they_went_in",
        oracle="Python's json, line by line",
        edits=(("line_file.py", '"utf-8", "backslashreplace"', '"utf-8"'),),
    ),
    Mutation(
        trap=57,
        name="entries wait in a buffer that a kill empties",
        test="tests/test_ledger.py::test_a_worker_that_is_killed_leaves_every_entry_that_it_made",
        oracle="a process that is killed",
        edits=(
            (
                "line_file.py",
                "left = left[os.write(self._file, left) :]",
                "left = __import__('atexit').register(os.write, self._file, bytes(left)) and b''",
            ),
        ),
    ),
    Mutation(
        trap=37,
        name="bytes are multiplied by the reciprocal of the deviation",
        test=PIXELS + "test_patches_are_normalised_by_channel_and_repeated",
        oracle="torchvision's normalize, which the processors call",
        edits=(("thd/pixels.py", "out=first).div_(deviation)", "out=first).mul_(1 / deviation)"),),
    ),
    Mutation(
        trap=37,
        name="a device waits twice for the same constants in each micro-batch",
        test=PIXELS + "test_a_device_gets_the_constants_of_a_form_once",
        oracle="the definition",
        edits=(("thd/pixels.py", "@functools.lru_cache(maxsize=64)\n", ""),),
    ),
    Mutation(
        trap=37,
        name="the second temporal half of an image is what memory held",
        test=PIXELS + "test_patches_are_normalised_by_channel_and_repeated",
        oracle="torchvision's normalize, which the processors call",
        edits=(
            (
                "thd/pixels.py",
                "        if form.repeat > 1:\n            part",
                "        if form.repeat > 2:\n            part",
            ),
        ),
    ),
    Mutation(
        trap=31,
        name="the state is that of the packs made ahead",
        test=AHEAD + "test_a_state_belongs_to_the_last_pack_that_was_used_whatever_was_read_since",
        oracle="a source that counts its packs",
        edits=(
            (
                "energon/replica_reader.py",
                "            later = None if self._last is None else self._last.state\n",
                "            later = None\n",
            ),
        ),
    ),
    Mutation(
        trap=31,
        name="after an error the state is that of the packs made ahead",
        test=AHEAD + "test_an_error_is_raised_at_its_pack_and_again_by_whoever_asks_on",
        oracle="the state before the error",
        edits=(
            (
                "energon/replica_reader.py",
                "error=made.error, state=None if self._last is None else self._last.state)",
                "error=made.error, state=None)",
            ),
        ),
    ),
    Mutation(
        trap=64,
        name="an error that nobody takes keeps the workers of a closed loader",
        test=AHEAD + "test_a_loader_ends_with_its_reader_whose_thread_met_an_error_that_nobody_took[error]",
        oracle="a weak reference to the source",
        edits=(
            (
                "energon/replica_reader.py",
                "self._ready.put(_without_frames(self._ready.get_nowait()))",
                "self._ready.put(self._ready.get_nowait())",
            ),
        ),
    ),
    Mutation(
        trap=64,
        name="a rank that has left keeps the last message from other hosts",
        test="tests/energon/test_replica.py::test_a_rank_that_is_gone_keeps_no_message_from_other_hosts",
        oracle="the broadcast of the message",
        edits=(
            (
                "energon/replica_channel.py",
                "finally:  # other hosts wait for it, whoever is missing on this one\n",
                "except ZeroDivisionError:\n            raise\n        else:\n",
            ),
        ),
    ),
    Mutation(
        trap=194,
        name="each reader has a budget of its own",
        test="tests/test_drop_budget.py::test_a_fiftieth_in_one_stretch_is_within_the_budget[64]",
        oracle="the share over all readers",
        edits=(
            (
                "ledger.py",
                "self._shares, self._workers, self._row = shares, workers, shares.row(worker % 126)",
                "self._shares, self._workers, self._row = shares, 1, Shares().row(worker)\n"
                "        self._shares = Shares()\n"
                "        self._row = self._shares.row(0)",
            ),
        ),
    ),
    Mutation(
        trap=194,
        name="only the share since the beginning counts",
        test="tests/test_drop_budget.py::test_a_store_that_goes_bad_late_is_found_as_soon_by_any_number_of_readers",
        oracle="samples read until the stop",
        edits=(("drops.py", "((0, 1), (2, readers * stretch * (stretch + 1)))", "((0, 1),)"),),
    ),
    Mutation(
        trap=204,
        name="the numbers of a loader are in the ranks' store by how many loaders the process has built",
        test=FREQUENT + "test_of_all_ranks_the_first_one_tells",
        oracle="two ranks of which one loads more",
        edits=(
            ("energon/loader.py", "repr(sorted(self.alike().items())).encode()", 'b""'),
            ("energon/loader.py", '{name}-{_PLACES[name]}"', '{_PLACES[name]}"'),
        ),
    ),
    Mutation(
        trap=204,
        name="the rank with the store ends without a word",
        test="tests/test_drop_budget.py::test_a_rank_that_outlives_the_first_one_goes_on_without_a_trace_of_the_store",
        oracle="what torch prints",
        edits=(("energon/loader.py", '{"over": int(hosts), "in": -1})["in"], 40 * hosts', '{"in": -1})["in"], 0'),),
    ),
    Mutation(
        trap=204,
        name="ranks that load something else count as far as those that load the same",
        test="tests/test_drop_budget.py::"
        "test_ranks_learn_the_drops_of_each_other_and_those_that_read_the_same_count_once[over]",
        oracle="the ranks that exchange numbers",
        edits=(("energon/loader.py", 'min(ranks, pooled["in"])', "ranks"),),
    ),
    Mutation(
        trap=204,
        name="numbers stay in the ranks' store",
        test="tests/test_drop_budget.py::"
        "test_ranks_learn_the_drops_of_each_other_and_those_that_read_the_same_count_once[over]",
        oracle="the store's own count of its keys",
        edits=(("energon/loader.py", '() if within else ("in",', '() if True else ("in",'),),
    ),
    Mutation(
        trap=205,
        name="the last samples of a plan are added up over its epochs",
        test="tests/test_ledger_report.py::test_the_last_samples_of_a_plan_are_those_of_its_last_epochs",
        oracle="the samples, counted by hand",
        edits=(("ledger.py", "            report.shares[2:] = 0, 0\n", "            pass\n"),),
    ),
    Mutation(
        trap=205,
        name="what was dropped of late is told with the reasons since the beginning as its own",
        test="tests/test_drop_budget.py::test_what_is_of_late_is_not_mixed_with_the_counts_since_the_beginning",
        oracle="the reasons since the beginning",
        edits=(("ledger.py", "{'since the beginning ' * late}", ""),),
    ),
    Mutation(
        trap=205,
        name="a sample is let out of quarantine in every data set that has one of its name",
        test="tests/test_ledger_report.py::test_a_sample_of_one_data_set_is_released_and_its_namesake_stays",
        oracle="the lines of the samples in quarantine",
        edits=(
            (
                "ledger.py",
                'if not {place[1], f"{place[1]}@{place[0]}"}.isdisjoint(keys)]',
                'if place[1] in {key.rsplit("@", 1)[0] for key in keys} | {*keys}]',
            ),
        ),
    ),
    Mutation(
        trap=205,
        name="a thread that cannot be started ends the training that it counts for",
        test="tests/energon/test_pack_metrics.py::test_a_process_that_can_start_no_thread_writes_its_lines",
        oracle="the lines of a run",
        edits=(("energon/metrics.py", "with contextlib.suppress(RuntimeError):", "if True:"),),
    ),
    Mutation(
        trap=195,
        name="the ledger begins after the restored samples are read",
        test=LOADER + "test_samples_that_a_restored_run_can_no_longer_use_are_in_the_report",
        oracle="the number of samples",
        edits=(
            (
                "energon/window.py",
                "        self._drop_lost(self._window, range(len(self._window.buffer)))\n",
                "        own = self.ledger._file\n"
                "        self.ledger._file = None\n"
                "        self._drop_lost(self._window, range(len(self._window.buffer)))\n",
            ),
            (
                "energon/window.py",
                "        return before\n",
                "        self.ledger._file = own\n        return before\n",
            ),
        ),
    ),
    Mutation(
        trap=196,
        name="each file decides by itself which run counts",
        test=LOADER + "test_a_new_run_with_fewer_readers_in_the_same_place_counts_alone",
        oracle="the number of samples",
        edits=(("ledger.py", "worker.choose(chosen.get(file))", "worker.choose(worker.name)"),),
    ),
    Mutation(
        trap=196,
        name="a run that goes on from an older state keeps the packs of the run between",
        test="tests/test_ledger_report.py::"
        "test_for_any_chain_of_runs_kills_and_restores_what_is_read_is_emitted_or_dropped_key_by_key",
        oracle="a model of runs, states and kills",
        edits=(("ledger.py", 'before = str(entry.get("of", last))', "before = last"),),
    ),
)
