"""Questions with answers, stories and reports, drawn from `words` by a random generator that the caller seeds.

Every answer follows from its question, from the text before it or from the facts in `words`, so a model that reads well
can do better than one that has only learned how often each word occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from energon_packing.demo import words

Exchange = tuple[str, str]


def a(noun: str) -> str:
    """The noun with its indefinite article: ``an owl``, ``a heron``."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def listing(names: list[str] | tuple[str, ...]) -> str:
    """``one``, ``one and two``, ``one, two and three``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def number(value: int) -> str:
    """Small numbers as words, others as digits."""
    return words.NUMBERS[value] if 0 <= value < len(words.NUMBERS) else str(value)


def upper(sentence: str) -> str:
    """The sentence with a capital first letter, the rest unchanged."""
    return sentence[:1].upper() + sentence[1:]


def town(rng: Random) -> str:
    """The name of a town that does not exist."""
    return rng.choice(words.TOWN_HEADS) + rng.choice(words.TOWN_TAILS)


def about_animal(rng: Random) -> Exchange:
    """Group, habitat, food or habit of an animal."""
    name = rng.choice(sorted(words.ANIMALS))
    group, habitat, food, habit = words.ANIMALS[name]
    return rng.choice(
        (
            (f"Where does {a(name)} live?", f"{upper(a(name))} lives in or near {habitat}. It is {a(group)}."),
            (f"What does {a(name)} eat?", f"{upper(a(name))} mostly eats {food}."),
            (
                f"Tell me something interesting about the {name}.",
                f"The {name} {habit}. It belongs to the group called {group}s and lives in {habitat}, "
                f"where it finds {food}.",
            ),
            (f"Is the {name} {a(group)}?", f"Yes, the {name} is {a(group)}. It {habit}."),
        )
    )


def about_tool(rng: Random) -> Exchange:
    """Material, use and care of a tool."""
    name = rng.choice(sorted(words.TOOLS))
    material, use, care = words.TOOLS[name]
    return rng.choice(
        (
            (f"What is {a(name)} used for?", f"You use {a(name)} to {use}. It is usually made of {material}."),
            (f"How do I look after {a(name)}?", f"To keep {a(name)} in good order, {care}."),
            (f"Which tool helps me to {use}?", f"{upper(a(name))} helps you to {use}."),
        )
    )


def about_dish(rng: Random) -> Exchange:
    """A recipe as a numbered list, or a list of what to buy."""
    name = rng.choice(sorted(words.DISHES))
    ingredients, steps = words.DISHES[name]
    if rng.random() < 0.4:
        guests = rng.randint(2, 12)
        return (
            f"What should I buy for {name} for {number(guests)} people?",
            f"For {name} for {number(guests)} people, buy {listing(ingredients)}.",
        )
    numbered = "\n".join(f"{index}. {upper(step)}." for index, step in enumerate(steps, start=1))
    return f"How do I make {name}?", f"You need {listing(ingredients)}.\n\n{numbered}"


def about_concept(rng: Random) -> Exchange:
    """An explanation, an example or a limit."""
    name = rng.choice(sorted(words.CONCEPTS))
    explanation, example, limit = words.CONCEPTS[name]
    return rng.choice(
        (
            (f"What is {name}?", f"In short: {explanation}. Think of {example}."),
            (f"Explain {name} to a child.", f"Imagine {example}. That is the idea: {explanation}."),
            (f"What should I keep in mind about {name}?", f"Keep in mind that {limit}. Otherwise, {explanation}."),
        )
    )


def about_sum(rng: Random) -> Exchange:
    """Small arithmetic in a sentence."""
    left, right = rng.randint(2, 60), rng.randint(2, 40)
    goods, name = rng.choice(words.GOODS), rng.choice(words.FIRST_NAMES)
    return rng.choice(
        (
            (
                f"{name} has {left} {goods} and buys {right} more. How many {goods} does {name} have now?",
                f"{left} + {right} = {left + right}, so {name} has {left + right} {goods}.",
            ),
            (
                f"{name} packs {left} boxes with {right} {goods} each. How many {goods} are that?",
                f"{left} x {right} = {left * right}. There are {left * right} {goods}.",
            ),
            (f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."),
            (
                f"There were {left + right} {goods} in the store and {name} sold {left}. How many are left?",
                f"{left + right} - {left} = {right}, so {right} {goods} are left.",
            ),
        )
    )


def about_town(rng: Random) -> Exchange:
    """A plan for a visit to an invented town."""
    name, day = town(rng), rng.choice(words.WEEKDAYS)
    first, second, third = rng.sample(words.SIGHTS, 3)
    return (
        f"I will spend {day} in {name}, where there is {first}, {second} and {third}. Can you plan my day?",
        f"Here is a plan for {day} in {name}:\n- Morning: visit {first}.\n- Noon: have lunch near {second}.\n"
        f"- Afternoon: walk to {third}.\n- Evening: rest, because the weather may be {rng.choice(words.WEATHER)}.",
    )


def about_code(rng: Random) -> Exchange:
    """A short Python function with one line of explanation."""
    name, does, body = rng.choice(words.FUNCTIONS)
    lines = "\n".join(f"    {line}" for line in body)
    return (
        f"Write a Python function `{name}` that {does}.",
        f"```python\ndef {name}(values):\n{lines}\n```\nThe function `{name}` {does}.",
    )


def about_order(rng: Random) -> Exchange:
    """Sorting names or numbers that the question gives."""
    if rng.random() < 0.5:
        names = rng.sample(words.FIRST_NAMES, rng.randint(3, 7))
        return f"Sort these names: {', '.join(names)}.", f"In alphabetical order: {', '.join(sorted(names))}."
    values = rng.sample(range(1, 100), rng.randint(3, 7))
    return (
        f"Sort these numbers from small to large: {', '.join(map(str, values))}.",
        f"{', '.join(map(str, sorted(values)))}.",
    )


TOPICS: dict[str, Callable[[Random], Exchange]] = {
    "animals": about_animal,
    "tools": about_tool,
    "cooking": about_dish,
    "ideas": about_concept,
    "sums": about_sum,
    "travel": about_town,
    "code": about_code,
    "order": about_order,
}


def sentence(rng: Random, hero: str, place: str) -> str:
    """One sentence of a story about `hero` in `place`."""
    event, other = rng.sample(words.EVENTS, 2)
    mood, weather, day = rng.choice(words.MOODS), rng.choice(words.WEATHER), rng.choice(words.WEEKDAYS)
    friend = rng.choice(words.FIRST_NAMES)
    return rng.choice(
        (
            f"On {weather} {day} morning {hero} {event}.",
            f"{hero} was {mood} and {event}, while {friend} {other}.",
            f"Nobody in {place} knew that {friend} {event}.",
            f"Later that {day} {hero} {event} and then {other}.",
            f'"Are you {mood}?" asked {friend}. {hero} only smiled and {event}.',
            f"The weather in {place} stayed {weather}, so {hero} {event}.",
            f"{friend}, who was a {rng.choice(words.TRADES)}, {event} because {hero} was {mood}.",
            f"Near {rng.choice(words.SIGHTS)} {hero} {event}.",
        )
    )


def story(rng: Random, characters: int) -> tuple[str, str]:
    """A story of about `characters` characters in paragraphs, and its summary."""
    hero, trade, place = rng.choice(words.FIRST_NAMES), rng.choice(words.TRADES), town(rng)
    sight, lesson = rng.choice(words.SIGHTS), rng.choice(words.LESSONS)
    paragraphs = [f"{hero} was {a(trade)} in {place}, a town with {sight}."]
    length = len(paragraphs[0])
    while length < characters:
        paragraph = " ".join(sentence(rng, hero, place) for _ in range(rng.randint(3, 6)))
        paragraphs.append(paragraph)
        length += len(paragraph) + 2
    paragraphs.append(f"In the end {hero} understood {lesson}.")
    summary = f"{hero}, {a(trade)} from {place}, lives through many small adventures and learns {lesson}."
    return "\n\n".join(paragraphs), summary


def stock_list(rng: Random, rows: int) -> tuple[str, list[Exchange]]:
    """A table of goods with counts and prices, and questions that it answers."""
    goods = rng.sample(words.GOODS, min(rows, len(words.GOODS)))
    counts = [rng.randint(1, 90) for _ in goods]
    prices = [rng.randint(1, 40) for _ in goods]
    lines = [f"| {name} | {count} | {price} |" for name, count, price in zip(goods, counts, prices, strict=True)]
    table = "\n".join(("| goods | count | price |", "| --- | --- | --- |", *lines))
    pick = rng.randrange(len(goods))
    dearest = max(range(len(goods)), key=lambda index: prices[index])
    return table, [
        (f"How many {goods[pick]} are on the list?", f"There are {counts[pick]} {goods[pick]} on the list."),
        (
            "Which goods have the highest price?",
            f"The highest price is {prices[dearest]}, which is the price of the {goods[dearest]}.",
        ),
        (
            f"What are all the {goods[pick]} worth together?",
            f"{counts[pick]} x {prices[pick]} = {counts[pick] * prices[pick]}.",
        ),
        ("How many pieces are there altogether?", f"Altogether there are {sum(counts)} pieces."),
    ]


def logbook(rng: Random, characters: int) -> tuple[str, list[Exchange]]:
    """A logbook of about `characters` characters with dated lines, and questions that it answers."""
    place, month = town(rng), rng.choice(words.MONTHS)
    entries: list[tuple[int, str, int, str]] = []
    lines: list[str] = []
    day, length = 1, 0
    while length < characters or not lines:
        weather, boats, name = rng.choice(words.WEATHER), rng.randint(0, 40), rng.choice(words.FIRST_NAMES)
        lines.append(
            f"Day {day}: {weather}, {boats} boats. {name} {rng.choice(words.EVENTS)} near {rng.choice(words.SIGHTS)}."
        )
        entries.append((day, weather, boats, name))
        length += len(lines[-1]) + 1
        day += 1
    text = f"Logbook of {place}, {month}\n" + "\n".join(lines)
    when, weather, boats, name = rng.choice(entries)
    most = max(entries, key=lambda entry: (entry[2], -entry[0]))
    return text, [
        (f"What was the weather on day {when}?", f"On day {when} it was {weather}."),
        (f"How many boats were counted on day {when}?", f"On day {when} there were {boats} boats."),
        (f"Who is mentioned on day {when}?", f"The entry of day {when} mentions {name}."),
        ("On which day were there the most boats?", f"Day {most[0]}, with {most[2]} boats."),
    ]
