"""The traps of foreign chat templates, one bug or more for each; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

TEMPLATE_TRAPS: dict[int, str] = {
    41: "a chat template hides calls, arguments, definitions or turns, and what is left is trained",
    42: "spans are taken for turns: the last span for the last answer, weights by their number",
    43: "a generation prompt that nobody asked for is trained behind the last answer",
    44: "an explicit empty system turn is dropped, and the template's default prompt comes back",
    45: "a template whose longer texts do not continue its shorter ones stops the run, or trains the wrong text",
    72: "white space at the beginning of an answer after thinking is lost",
    73: "mask and trim_empty do nothing under a template whose thinking they don't recognise",
}

PAIRS = "tests/chat/test_template_pairs.py::"
TRAPS = "tests/chat/test_template_traps.py::"
WORDS = "the words of the conversation"

TEMPLATE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=41,
        name="what is missing from the text is not looked for",
        test=TRAPS + "test_what_a_template_hides_is_refused_by_name[a short name that stands elsewhere in the text]",
        oracle=WORDS,
        edits=(("chat/marks.py", "sorted({*range(len(self.pieces))} - {*self.order})", "[]"),),
    ),
    Mutation(
        trap=41,
        name="a setting for definitions allows calls too",
        test=TRAPS + "test_what_a_template_hides_is_refused_by_name[a call where definitions may be hidden]",
        oracle=WORDS,
        edits=(
            (
                "chat/structures.py",
                'allowed = {"definition"} if',
                'allowed = {"definition", "call", "argument"} if',
            ),
        ),
    ),
    Mutation(
        trap=41,
        name="calls are passed in one way only",
        test=TRAPS + "test_what_is_trained_is[calls of deepseek, passed as its template wants them]",
        oracle="DeepSeek-V3's published template",
        edits=(("chat/structures.py", "for as_text in (False, True):", "for as_text in (False,):"),),
    ),
    Mutation(
        trap=41,
        name="arguments stand as Python writes them",
        test=TRAPS + "test_what_is_trained_is[arguments as JSON where a template would print an object]",
        oracle="the definition",
        edits=(("chat/structures.py", "int(structure.as_python))", "0)"),),
    ),
    Mutation(
        trap=41,
        name="a turn may stand before the turns that it followed",
        test=TRAPS + "test_what_a_template_hides_is_refused_by_name[a later turn that is put first]",
        oracle=WORDS,
        edits=(("chat/marks.py", "            if turn < latest:\n", "            if False:\n"),),
    ),
    Mutation(
        trap=42,
        name="the last span is the last answer",
        test=TRAPS + "test_what_is_trained_is[the last answer, marked in two blocks]",
        oracle="the turns of the conversation",
        edits=(
            (
                "chat/template.py",
                '        return _with_gaps(chosen, len(text)) if self.train_on == "all" else chosen\n',
                '        return chosen[-1:] if self.train_on == "last_assistant" else chosen\n',
            ),
        ),
    ),
    Mutation(
        trap=42,
        name="without a mark in the last answer an earlier one is the last",
        test=TRAPS + "test_what_a_template_hides_is_refused_by_name[a last answer without a mark]",
        oracle="the turns of the conversation",
        edits=(("chat/template.py", "answers = answers[-1:]", "answers = [*filter(spans.get, answers)][-1:]"),),
    ),
    Mutation(
        trap=43,
        name="a last answer that no token ends goes on to the end of the text",
        test=TRAPS + "test_what_is_trained_is[no header that nobody asked for, where the next header ends a turn]",
        oracle=WORDS,
        edits=(
            (
                "chat/structures.py",
                "            return self.stops.opening(frame) or closing, ",
                "            return len(frame), ",
            ),
        ),
    ),
    Mutation(
        trap=44,
        name="a template may take an empty system turn for none",
        test=TRAPS + "test_an_empty_system_turn_suppresses_the_default_prompt_or_costs_the_sample",
        oracle="the template's text without a system turn",
        edits=(("chat/structures.py", "and self._renderer.hides_empty_system", "and False"),),
    ),
    Mutation(
        trap=45,
        name="an answer begins where the conversation alone ends",
        test=TRAPS + "test_what_is_trained_is[answers of qwen3, which takes back earlier thinking]",
        oracle="Qwen3's published template",
        edits=(
            (
                "chat/structures.py",
                "asked = self.render(self.messages[:turn], True)",
                "asked = self.render(self.messages[:turn], False)",
            ),
        ),
    ),
    Mutation(
        trap=45,
        name="a header ends in the middle of a token",
        test=TRAPS + "test_what_is_trained_is[a whole token where the prompt offers another]",
        oracle=WORDS,
        edits=(
            (
                "chat/structures.py",
                "        header = min(self.stops.whole(prompt, header), self.stops.whole(frame, header))\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=45,
        name="a header that ends an answer is not trained",
        test=TRAPS + "test_an_answer_that_only_the_next_header_ends_is_trained_with_that_header",
        oracle="where GLM-4.5 stops",
        edits=(
            (
                "chat/structures.py",
                "        return closing + (opening or 0), ",
                "        return closing, ",
            ),
        ),
    ),
    Mutation(
        trap=45,
        name="a token across the end of an answer is trained",
        test=TRAPS + "test_a_token_across_the_end_of_an_answer_is_not_trained",
        oracle="the characters of each token",
        edits=(("encoders/targets.py", "text.reaches_over(last - 1, span.end)", "False"),),
    ),
    Mutation(
        trap=45,
        name="nested thinking is taken apart at its inner tags",
        test=TRAPS + "test_no_token_of_masked_thinking_is_trained_however_it_is_nested",
        oracle="the definition",
        edits=(
            (
                "chat/template.py",
                'while kind == "thinking" and at',
                "while False and at",
            ),
        ),
    ),
    Mutation(
        trap=72,
        name="an answer beside thinking loses its indentation where the template has a channel",
        test=PAIRS + "test_the_text_of_a_record_is_what_transformers_renders_and_its_answers_alone_are_trained[gptoss]",
        oracle="transformers on the record's messages",
        edits=(("chat/thinking.py", "after.lstrip(LINE_ENDS)", "after.lstrip()"),),
    ),
    Mutation(
        trap=72,
        name="thinking of a field is written into the text",
        test=PAIRS
        + "test_the_text_of_a_record_is_what_transformers_renders_and_its_answers_alone_are_trained[nemotron_3_nano]",
        oracle="transformers on the record's messages",
        edits=(("chat/marks.py", "not passing.thinking_apart:", "True:"),),
    ),
    Mutation(
        trap=72,
        name="thinking in a text is passed as a field to a template that reads its tags",
        test=PAIRS
        + "test_the_text_of_a_record_is_what_transformers_renders_and_its_answers_alone_are_trained[qwen3_6]",
        oracle="transformers on the record's messages",
        edits=(("chat/renderer.py", "form.field and not form.inline", "form.field"),),
    ),
    Mutation(
        trap=72,
        name="strip takes the indentation with the thinking",
        test=PAIRS + "test_stripped_thinking_leaves_what_transformers_renders_of_the_record_without_it[qwen2_5]",
        oracle="transformers on the record without thinking",
        edits=(("chat/thinking.py", '"" if depth else LINE_ENDS', '"" if depth else None'),),
    ),
    Mutation(
        trap=73,
        name="only thinking tags are masked",
        test=PAIRS
        + "test_masked_thinking_is_what_stands_between_the_marks_of_the_template_and_nothing_else[gemma4_v5]",
        oracle="the marks of Gemma 4",
        edits=(
            (
                "chat/renderer.py",
                "return find_form(render)",
                "return find_form(render)._replace(opening=PLAIN.opening, closing=PLAIN.closing)",
            ),
        ),
    ),
    Mutation(
        trap=73,
        name="empty thinking that the template writes stays",
        test=PAIRS + "test_empty_thinking_is_trimmed_from_the_record_and_from_what_the_template_writes[qwen3_5_think]",
        oracle="the marks of Qwen3.5",
        edits=(("chat/template.py", "self._empty(reading, spans, breaks=True)", "[]"),),
    ),
    Mutation(
        trap=73,
        name="empty thinking is masked only where an answer opens with it",
        test="tests/chat/test_template_traps.py::"
        "test_thinking_in_the_middle_of_an_answer_is_masked_with_or_without_words[-plain]",
        oracle="the record",
        edits=(("chat/template.py", "[: 1 if breaks else None]", "[:1]"),),
    ),
    Mutation(
        trap=197,
        name="a template that marks answers trains one without words",
        test=TRAPS + "test_an_answer_without_words_has_one_reason_whether_the_template_marks_answers_or_not",
        oracle="the definition",
        edits=(("chat/template.py", "turn in worded and (", "("),),
    ),
    Mutation(
        trap=197,
        name="an answer of masked thinking alone trains its end",
        test=TRAPS + "test_an_answer_whose_only_words_are_masked_thinking_has_none[-plain]",
        oracle="the definition",
        edits=(("chat/template.py", 'if self.thinking != "mask" or piece.kind', "if True or piece.kind"),),
    ),
)
