"""The traps of choosing what is trained, one bug or more for each; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

TARGET_TRAPS: dict[int, str] = {
    69: "cutting a conversation makes an earlier answer the last one",
    70: "texts that a family inserts for media are trained",
    71: "samples that should count the same do not, with turn weights",
}

CHOSEN = "tests/encoders/test_chosen_targets.py::"
WEIGHTS = "tests/encoders/test_weights_of_the_loss.py::"
WHOLE = "the labels of the whole record"

TARGET_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=69,
        name="a cut conversation chooses its targets anew",
        test=CHOSEN + "test_what_a_cut_conversation_trains_is_what_the_whole_one_trains_of_it",
        oracle=WHOLE,
        edits=(("encoders/fitting.py", "chosen = choose(conversation)", "chosen = range(len(conversation.turns))"),),
    ),
    Mutation(
        trap=69,
        name="an answer that the whole record does not train is trained in a beginning",
        test=CHOSEN + "test_an_answer_that_the_template_marks_only_at_the_end_is_not_trained_by_cutting",
        oracle=WHOLE,
        edits=(("encoders/fitting.py", 'turn.role == "assistant" and number not in trained', "False"),),
    ),
    Mutation(
        trap=69,
        name="turns are chosen by their role, not by what the template marks in the whole",
        test=CHOSEN + "test_an_answer_that_the_template_marks_only_at_the_end_is_not_trained_by_cutting",
        oracle=WHOLE,
        edits=(
            (
                "chat/template.py",
                "        chat = self.render(conversation)\n        return frozenset(\n",
                '        if self.train_on == "assistant":\n'
                "            return frozenset(range(len(conversation.turns)))\n"
                "        chat = self.render(conversation)\n        return frozenset(\n",
            ),
        ),
    ),
    Mutation(
        trap=69,
        name="a label stays where the answer that it describes is cut off",
        test=CHOSEN + "test_labels_stay_on_the_answers_that_they_describe_or_the_cut_is_not_made",
        oracle="the turns that the record has",
        edits=(
            (
                "encoders/fitting.py",
                "any(name != PREFERENCE or value for name, value in measured.extras.items())",
                "False",
            ),
        ),
    ),
    Mutation(
        trap=70,
        name="only the tokens of media are not trained",
        test=CHOSEN + "test_no_token_of_the_text_of_media_in_an_answer_is_trained_and_all_others_are"
        "[qwen3_vl-1 video-assistant]",
        oracle="the expansion of Hugging Face's processor",
        edits=(
            (
                "encoders/tokenized.py",
                "        spans += [TrainedSpan(start, end, 0.0) for start, end in media]\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=70,
        name="only tokens inside a media text are not trained, those across its border are",
        test=CHOSEN + "test_a_token_that_holds_the_end_of_a_media_text_and_the_beginning_of_the_answer_is_not_trained",
        oracle="the characters of each token",
        edits=(
            (
                "encoders/targets.py",
                "text.tokens_of(span.start, span.end)\n",
                "text.tokens_of(span.start + 2 * (not span.weight), span.end - 2 * (not span.weight))\n",
            ),
        ),
    ),
    Mutation(
        trap=70,
        name="what the template writes around a medium is trained where it counts the media",
        test=CHOSEN + "test_what_a_template_writes_around_a_medium_is_not_trained_even_where_it_counts_the_media",
        oracle="the template's text without its media",
        edits=(("encoders/tokenized.py", 're.sub(r"\\d+", r"\\\\d+", re.escape(side))', "re.escape(side)"),),
    ),
    Mutation(
        trap=71,
        name="a sample's share is divided by the number of its targets",
        test=WEIGHTS + "test_samples_count_the_same_whatever_their_turns_weigh_and_turns_weigh_what_they_say[sample]",
        oracle="len2weight of InternVL",
        edits=(
            (
                "encoders/encoder.py",
                "targets if weights is None else float(weights[1:].sum(dtype=np.float64))",
                "targets",
            ),
        ),
    ),
)
