"""The traps of nodes that vanish and shards that are set aside; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

EXECUTORS = "tests/executors/test_executors.py::"
ASIDE = "tests/offline/test_shards_set_aside.py::"
HOLE = ASIDE + "test_a_shard_that_kills_its_workers_is_a_hole_that_the_plan_must_name[polylithic]"
WORK, LOCAL = "executors/work.py", "executors/local.py"

CLUSTER_TRAPS = {
    266: "a node that vanishes is taken for a shard that kills its workers, or the other way round",
    267: "one shard that kills its workers ends the work at all others",
    268: "a plan lacks the samples of a shard that nobody could measure, and does not say so",
    269: "a slow worker is waited for, or its result counts twice, or much is done twice",
    270: "a job of an array does other shards than are missing, or says that it is complete when it is not",
}

CLUSTER_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=266,
        name="a task whose node is lost has had a death",
        test=EXECUTORS + "test_a_task_that_is_taken_back_has_had_no_death_and_one_whose_nodes_vanish_is_given_up_late",
        oracle="the definition; nodes of `ray.cluster_utils` that are killed, in `test_ray_nodes.py`",
        edits=(
            (WORK, "        attempt.workers -= 1\n", "        attempt.workers -= 1\n        attempt.deaths += 1\n"),
        ),
    ),
    Mutation(
        trap=266,
        name="a shard that takes its node with it is tried for ever",
        test=EXECUTORS + "test_a_task_that_is_taken_back_has_had_no_death_and_one_whose_nodes_vanish_is_given_up_late",
        oracle="the definition",
        edits=((WORK, " and attempt.losses < MOST_LOSSES and not in_vain:", " and not in_vain:"),),
    ),
    Mutation(
        trap=266,
        name="a worker that died while it was idle is a death of the next task",
        test=EXECUTORS + "test_a_worker_that_dies_while_it_is_idle_is_no_death_at_the_next_task",
        oracle="the definition",
        edits=(
            (LOCAL, "not (held or worker.process.is_alive())", "False"),
            (LOCAL, "if worker is not None:  # else", "if False:  # else"),
        ),
    ),
    Mutation(
        trap=267,
        name="a task that stands alone ends the command",
        test=EXECUTORS + "test_a_task_that_stands_alone_is_given_up_while_the_others_are_done[local]",
        oracle="the definition",
        edits=(
            (
                WORK,
                "        if self._apart is None or in_vain:\n            raise",
                "        if True:\n            raise",
            ),
        ),
    ),
    Mutation(
        trap=267,
        name="the last try is not the last",
        test=EXECUTORS + "test_a_task_at_which_three_workers_died_is_given_up_by_name[local]",
        oracle="the notes that each attempt leaves",
        edits=((WORK, "(self._last if suspect else self._again)", "self._again"),),
    ),
    Mutation(
        trap=268,
        name="a plan is made of an index with a hole",
        test=HOLE,
        oracle="the samples of the data set",
        edits=(("offline/planner.py", "if left := sorted(holes.keys() - without):", "if left := []:"),),
    ),
    Mutation(
        trap=268,
        name="a hole is taken for measured, and never tried again",
        test=HOLE,
        oracle="the index of one process",
        edits=(("offline/measure.py", '{"fingerprint": ""} if why else {}', "{}"),),
    ),
    Mutation(
        trap=268,
        name="packs are complete without a shard",
        test=ASIDE + "test_packs_that_kill_their_workers_are_named_and_the_others_are_there[polylithic]",
        oracle="the files of one process",
        edits=(("offline/pack.py", "if not (shared.missing or shared.set_aside):", "if not shared.missing:"),),
    ),
    Mutation(
        trap=268,
        name="rows that were set aside after the index are drops of a plan",
        test=ASIDE + "test_a_plan_refuses_rows_that_were_set_aside_after_the_index_was_written[polylithic]",
        oracle="the samples of the data set",
        edits=(("offline/index.py", 'if (found.get("fingerprint") == "") != shard.set_aside:', "if False:"),),
    ),
    Mutation(
        trap=268,
        name="rows that another command measured meanwhile are set aside",
        test=ASIDE + "test_rows_that_another_command_measured_meanwhile_are_not_set_aside[polylithic]",
        oracle="the files of one process",
        edits=(("offline/shared_work.py", "and (result := there(task)) is None:", "and not (result := None):"),),
    ),
    Mutation(
        trap=269,
        name="a slow worker goes on when its task is done",
        test=EXECUTORS + "test_a_slow_task_is_done_by_a_second_worker_and_the_first_result_counts[local]",
        oracle="two tasks that need two workers at once",
        edits=(
            (LOCAL, "                                other.process.kill()\n", "                                pass\n"),
        ),
    ),
    Mutation(
        trap=269,
        name="a second worker waits for the lock of the first",
        test=ASIDE + "test_a_shard_that_two_workers_pack_at_once_has_the_same_bytes[polylithic]",
        oracle="the files of one process",
        edits=(("offline/formats/shards.py", "nullcontext(True) if task.twice else locked", "locked"),),
    ),
    Mutation(
        trap=269,
        name="both results of a task count",
        test=EXECUTORS + "test_what_the_slower_of_two_workers_returns_or_raises_is_nobodys[is beaten]",
        oracle="the tasks",
        edits=((WORK, "first, attempt.ended = not attempt.ended, True", "first, attempt.ended = True, True"),),
    ),
    Mutation(
        trap=269,
        name="every slow task is done twice",
        test=EXECUTORS + "test_one_task_in_twenty_at_most_is_done_twice",
        oracle="the notes that each attempt leaves",
        edits=((WORK, " or self._twice >= max(1, done // _ONE_IN)", ""),),
    ),
    Mutation(
        trap=270,
        name="a list is ignored",
        test=ASIDE + "test_lists_that_cannot_be_are_refused[polylithic-words5-which is no shard of this command; write "
        "the lists anew]",
        oracle="the definition",
        edits=(("offline/shared_work.py", "    if named is not None:\n", "    if False:\n"),),
    ),
    Mutation(
        trap=270,
        name="the last step ends with 0 although shards are missing",
        test=ASIDE + "test_an_array_of_slurm_of_which_some_are_killed_ends_with_the_files_of_one_process[polylithic]",
        oracle="the list of what is missing",
        edits=(("offline/shared_work.py", "{words} && [ ! -s {missing} ]", "{words}"),),
    ),
    Mutation(
        trap=269,
        name="a task at which a worker died is given to a second one beside it",
        test=EXECUTORS
        + "test_a_task_at_which_a_worker_died_is_tried_by_one_at_a_time_and_a_second_one_that_never_began_"
        "costs_nothing",
        oracle="the definition",
        edits=((WORK, " and not each.deaths + each.losses]", "]"),),
    ),
    Mutation(
        trap=267,
        name="workers that all die are the fault of one task after another",
        test=EXECUTORS + "test_workers_that_all_die_are_no_matter_of_the_tasks[1000]",
        oracle="the definition",
        edits=((WORK, "self._deaths >= MOST_IN_VAIN and not self._seconds", "False"),),
    ),
    Mutation(
        trap=270,
        name="the limit of an array is a word of another option",
        test=ASIDE + "test_the_limit_of_an_array_is_that_of_the_option_and_of_no_other[words4-]",
        oracle="what a stand-in of `sbatch` is given",
        edits=(("offline/shared_work.py", "^(-a|--array=?)[0-9", "^(-a|--array=?)?[0-9"),),
    ),
)
