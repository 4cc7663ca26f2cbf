"""Bugs of plans in stages, and of those that go on from another plan."""

from mutation_table import Mutation

STAGES = "tests/offline/test_stages.py::"
MIX = STAGES + "test_each_stage_has_its_tokens_in_its_mix_and_no_sample_comes_twice_before_all_have[tokens]"
EXTENDED = STAGES + "test_an_extended_plan_keeps_what_was_trained_and_gives_all_the_rest_once"
STAYING = STAGES + "test_weights_that_stay_give_what_they_gave_and_a_data_set_that_is_switched_off_gives_nothing[0.5]"

STAGE_TRAPS = {
    275: "a stage has other tokens or another mix than it was given, or begins its data sets anew",
    276: "a plan that goes on from another one gives what was trained once more, or loses what was not",
}

STAGE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=275,
        name="each stage begins with the first samples",
        test=MIX,
        oracle="how often each sample may come",
        edits=(("offline/blend.py", "            before, low = after, [last for _, last in intervals]\n", ""),),
    ),
    Mutation(
        trap=275,
        name="weights of a stage share out samples of a mean length",
        test=MIX,
        oracle="the tokens of each data set in the packs",
        edits=(("offline/blend.py", "weights / np.maximum(amounts, 1)", "weights / np.maximum(amounts.mean(), 1)"),),
    ),
    Mutation(
        trap=276,
        name="what the kept packs have of an epoch comes again",
        test=EXTENDED,
        oracle="the samples of the old plan, each as often as its epochs say",
        edits=(("offline/blend.py", "np.flatnonzero(times <= turn)", "np.arange(end - start)"),),
    ),
    Mutation(
        trap=276,
        name="what the kept packs lack of an epoch is lost",
        test=EXTENDED,
        oracle="the samples of the old plan, each as often as its epochs say",
        edits=(
            ("offline/blend.py", "((places < last) | (last >= begun))", "(places < last) & (places > given + 0.01)"),
        ),
    ),
    Mutation(
        trap=276,
        name="a data set that was added has the epochs of before, too",
        test=EXTENDED,
        oracle="the samples of the old plan, each as often as its epochs say",
        edits=(("offline/blend.py", "start + repeats * (number - begun + 1)", "repeats * (number + 1)"),),
    ),
    Mutation(
        trap=276,
        name="a stage that has begun has all of its tokens once more",
        test=STAGES + "test_an_extended_plan_of_stages_gives_the_tokens_that_are_left",
        oracle="the tokens of the stages",
        edits=(("offline/blend.py", "max(0.0, 1 - tokens / ", "max(1.0, 1 - tokens / "),),
    ),
    Mutation(
        trap=276,
        name="other settings of packs are taken for those of the old plan",
        test=STAGES + "test_what_no_plan_can_go_on_from_is_refused[change1-max_segments]",
        oracle="the settings of the old plan",
        edits=(
            ("offline/blend.py", '{"plan", "rest", "extends"}', '{"plan", "rest", "extends", "max_segments_per_pack"}'),
        ),
    ),
    Mutation(
        trap=276,
        name="an epoch that was changed on its way counts as one of its last settings",
        test=STAYING,
        oracle="the mix of the plan before",
        edits=(("offline/blend.py", "@ same * (start >= changed),", "@ same,"),),
    ),
    Mutation(
        trap=276,
        name="a data set that is switched off goes on to the end of its epoch",
        test=STAYING,
        oracle="the packs, which have none of it",
        edits=(
            (
                "offline/blend.py",
                "np.where(repeats > 0, start, 0.0), given - repeats",
                "start, np.ceil(given) - repeats",
            ),
        ),
    ),
    Mutation(
        trap=276,
        name="what could be measured at last is owed all that was before",
        test=STAGES
        + "test_what_could_be_measured_at_last_never_comes_twice_before_the_others_come_again[after0-before0]",
        oracle="how often each sample may come",
        edits=(("offline/blend.py", "min(math.floor(position(turn)), cap)", "0"),),
    ),
)
