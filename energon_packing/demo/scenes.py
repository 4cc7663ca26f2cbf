"""What a demo image or clip shows, and what can be said about it; `pictures` and `clips` draw it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from energon_packing.demo import words
from energon_packing.demo.prose import Exchange, a, listing, number, upper


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One shape: `place` is (column, row) on a grid of 3 x 3 cells."""

    shape: str
    colour: str
    place: tuple[int, int]

    @property
    def name(self) -> str:
        """For example ``red circle``."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image: figures on a background, with an optional word below them."""

    background: str
    gradient: bool
    figures: tuple[Figure, ...]
    caption: str | None

    def counted(self) -> str:
        """The figures with their counts: ``two red circles and one blue star``."""
        counts: dict[str, int] = {}
        for figure in self.figures:
            counts[figure.name] = counts.get(figure.name, 0) + 1
        names = [f"{number(count)} {plural(name) if count > 1 else name}" for name, count in counts.items()]
        return listing(names)

    def description(self) -> str:
        """A full description in sentences."""
        ground = f"{a(self.background)} background" + (" that fades to a darker shade" if self.gradient else "")
        text = f"The picture shows {self.counted()} on {ground}."
        for figure in self.figures:
            text += f" {upper(a(figure.name))} is at the {words.PLACES[figure.place]}."
        if self.caption:
            text += f' Below it says "{self.caption}".'
        return text

    def exchanges(self, rng: Random) -> list[Exchange]:
        """Questions about the picture with their answers, in random order."""
        figure = rng.choice(self.figures)
        where = words.PLACES[figure.place]
        shape = rng.choice(words.SHAPES)
        count = sum(other.shape == shape for other in self.figures)
        found = f"{upper(number(count))} of them." if count else f"There is no {shape} in this picture."
        exchanges = [
            ("Describe the picture.", self.description()),
            ("How many shapes are there?", f"There are {number(len(self.figures))}: {self.counted()}."),
            (f"How many {plural(shape)} do you see?", found),
            (f"What is at the {where}?", f"At the {where} there is {a(figure.name)}."),
            ("What colour is the background?", f"The background is {self.background}."),
            ("Which colours do the shapes have?", f"They are {listing(sorted({f.colour for f in self.figures}))}."),
        ]
        if self.caption:
            exchanges.append(("What is written in the picture?", f'It says "{self.caption}".'))
        rng.shuffle(exchanges)
        return exchanges


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A video: one figure that moves over a background."""

    background: str
    shape: str
    colour: str
    direction: str

    @property
    def name(self) -> str:
        """For example ``red circle``."""
        return f"{self.colour} {self.shape}"

    def description(self) -> str:
        """A full description in one sentence."""
        return f"The video shows {a(self.name)} that moves {self.direction} over {a(self.background)} background."

    def exchanges(self, rng: Random) -> list[Exchange]:
        """Questions about the clip with their answers, in random order."""
        exchanges = [
            ("What happens in the video?", self.description()),
            (f"In which direction does the {self.shape} move?", f"It moves {self.direction}."),
            ("What moves in this clip?", f"{upper(a(self.name))} moves."),
            ("What does the background look like?", f"It is {self.background} all the time."),
        ]
        rng.shuffle(exchanges)
        return exchanges


def plural(name: str) -> str:
    """The plural of a shape's name, colour included."""
    return name + ("es" if name.endswith("s") else "s")


def draw_picture(rng: Random) -> Picture:
    """A random picture with one to six figures in different cells, none in the colour of the background."""
    background = rng.choice(sorted(words.COLOURS))
    colours = [name for name in words.COLOURS if name != background]
    places = rng.sample(sorted(words.PLACES), rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))
    kinds = [(rng.choice(words.SHAPES), rng.choice(colours)) for _ in range(3)]
    figures = tuple(
        Figure(shape=shape, colour=colour, place=place)
        for place in sorted(places, key=lambda cell: (cell[1], cell[0]))
        for shape, colour in (rng.choice(kinds),)
    )
    caption = rng.choice(words.GOODS).upper() if rng.random() < 0.25 else None
    return Picture(background=background, gradient=rng.random() < 0.4, figures=figures, caption=caption)


def draw_clip(rng: Random) -> Clip:
    """A random clip."""
    background, colour = rng.sample(sorted(words.COLOURS), 2)
    return Clip(
        background=background,
        shape=rng.choice(words.SHAPES),
        colour=colour,
        direction=rng.choice(sorted(words.DIRECTIONS)),
    )
