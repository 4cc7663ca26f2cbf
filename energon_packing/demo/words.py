"""The words of the demo: who and what its conversations talk about. `generate` makes sentences of them.

The demo's tokenizer knows these words, and more; its text was made from longer lists.
"""

# Far enough apart to be told apart after JPEG compression.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40), "green": (46, 139, 62), "blue": (38, 84, 186), "yellow": (245, 205, 48),
    "orange": (240, 130, 30), "purple": (122, 52, 160), "pink": (240, 130, 180), "brown": (120, 72, 36),
    "black": (20, 20, 20), "white": (248, 248, 248), "grey": (128, 128, 128), "turquoise": (48, 190, 180),
}  # fmt: skip
SHAPES: dict[str, tuple[int, int, float]] = {
    "circle": (40, 0, 1.0), "square": (4, 45, 1.0), "triangle": (3, 0, 1.0), "diamond": (4, 0, 1.0),
    "star": (10, 0, 0.42),
}  # fmt: skip
"""A shape's corners, the turn of the first one in degrees, and how far in every other corner is."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
PLACES: dict[tuple[int, int], str] = {
    (0, 0): "top left", (1, 0): "top centre", (2, 0): "top right",
    (0, 1): "middle left", (1, 1): "centre", (2, 1): "middle right",
    (0, 2): "bottom left", (1, 2): "bottom centre", (2, 2): "bottom right",
}  # fmt: skip
DIRECTIONS: dict[str, tuple[int, int]] = {
    "from left to right": (1, 0), "from right to left": (-1, 0), "from top to bottom": (0, 1),
    "from bottom to top": (0, -1), "diagonally down to the right": (1, 1), "diagonally up to the right": (1, -1),
}  # fmt: skip
# name: (group, habitat, food, habit)
ANIMALS: dict[str, tuple[str, str, str, str]] = {
    "otter": ("mammal", "rivers and quiet coasts", "fish and crabs", "floats on its back while it eats"),
    "badger": ("mammal", "woodland and hedgerows", "earthworms and roots", "digs long tunnels and cleans them often"),
    "hedgehog": ("mammal", "gardens and meadows", "beetles and slugs", "rolls into a ball when it is afraid"),
    "elephant": ("mammal", "savannah and forest", "grass, bark and fruit", "remembers water holes for many years"),
    "camel": ("mammal", "dry deserts", "thorny plants", "stores fat in its hump"),
    "dolphin": ("mammal", "warm seas", "squid and small fish", "finds its way with sound"),
    "bat": ("mammal", "caves and old attics", "moths and mosquitoes", "hunts at night by echo"),
    "heron": ("bird", "marshes and shallow lakes", "frogs and fish", "stands still for a long time before it strikes"),
    "owl": ("bird", "barns and dark forests", "mice and voles", "flies almost without a sound"),
    "swallow": ("bird", "farms and open country", "flying insects", "travels thousands of kilometres every autumn"),
    "penguin": ("bird", "cold southern coasts", "krill and fish", "swims fast but cannot fly"),
    "woodpecker": ("bird", "old forests", "larvae under the bark", "drums on hollow trunks to call a partner"),
    "salmon": ("fish", "oceans and cold rivers", "shrimp and insects", "returns to the stream where it was born"),
    "eel": ("fish", "rivers and the open ocean", "worms and snails", "crosses an ocean to lay its eggs"),
    "shark": ("fish", "open water and reefs", "fish and seals", "replaces its teeth throughout its life"),
    "frog": ("amphibian", "ponds and wet meadows", "flies and spiders", "breathes partly through its skin"),
    "salamander": ("amphibian", "damp forests", "worms and slugs", "can grow a lost tail again"),
    "lizard": ("reptile", "sunny walls and rocks", "ants and crickets", "drops its tail to escape"),
    "tortoise": ("reptile", "dry scrubland", "leaves and flowers", "may live for more than a hundred years"),
    "bee": ("insect", "hollow trees and hives", "nectar and pollen", "dances to show where flowers are"),
    "ant": ("insect", "soil and rotten wood", "seeds and honeydew", "carries many times its own weight"),
    "dragonfly": ("insect", "ponds and slow streams", "mosquitoes", "can fly backwards"),
    "octopus": ("mollusc", "rocky sea floors", "crabs and shells", "changes its colour within a second"),
    "snail": ("mollusc", "gardens and damp walls", "leaves and algae", "seals its shell in dry weather"),
}
FIRST_NAMES: tuple[str, ...] = (
    "Ada", "Amir", "Bela", "Carla", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena",
    "Marta", "Nils", "Olga", "Paulo", "Rosa", "Samir", "Tove", "Uma", "Viktor", "Wanda", "Yuki", "Zoe",
)  # fmt: skip
WEEKDAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEATHER: tuple[str, ...] = (
    "sunny", "cloudy", "rainy", "foggy", "windy", "stormy", "snowy", "mild", "freezing", "humid", "clear", "overcast",
)  # fmt: skip
GOODS: tuple[str, ...] = (
    "apples", "pears", "walnuts", "candles", "blankets", "notebooks", "pencils", "lamps", "baskets", "bricks",
    "barrels", "ropes", "bottles", "mirrors", "chairs", "shirts", "boots", "umbrellas", "bicycles", "batteries",
    "cables", "screws", "seeds", "potatoes", "cheeses", "loaves", "books", "maps", "tickets", "parcels",
)  # fmt: skip
TRADES: tuple[str, ...] = (
    "baker", "carpenter", "teacher", "farmer", "doctor", "engineer", "painter", "sailor", "gardener", "librarian",
    "musician", "nurse", "pilot", "tailor", "miller", "potter", "journalist", "chemist", "fisherman", "clockmaker",
)  # fmt: skip
SIGHTS: tuple[str, ...] = (
    "an old stone bridge", "a lighthouse", "a covered market", "a botanical garden", "a small harbour", "a clock tower",
    "a ruined castle", "a railway museum", "a windmill", "a library with a glass roof", "a public bath", "a town hall",
    "an observatory", "a narrow canal", "a theatre", "a cathedral", "a ferry landing", "a weekly flea market",
)  # fmt: skip
MOODS: tuple[str, ...] = (
    "curious", "patient", "nervous", "cheerful", "tired", "careful", "proud", "lonely", "brave", "stubborn", "grateful",
    "worried", "calm", "hopeful", "surprised", "determined",
)  # fmt: skip
EVENTS: tuple[str, ...] = (
    "found a letter under the floor", "heard a strange noise behind the wall", "lost the key to the workshop",
    "met an old friend on the bridge", "repaired the broken pump", "followed the tracks of a fox", "won a small prize",
    "missed the last train", "planted a row of cherry trees", "drew a map of the valley", "counted the boats again",
    "lit the stove and made tea", "wrote everything down in a diary", "borrowed a boat", "waited for the rain to stop",
    "opened the heavy door", "learned an unusual song", "discovered a hidden path", "shared bread with a stranger",
    "climbed the hill before sunrise", "forgot to wind the clock", "carried water from the well",
)  # fmt: skip
LESSONS: tuple[str, ...] = (
    "that patience is worth more than speed", "that a good question saves a day of work",
    "that small repairs prevent large ones", "that neighbours are closer than they seem",
    "that a map is not the country", "that silence can be an answer", "that nothing is finished in one evening",
)  # fmt: skip
TOWNS: tuple[str, ...] = (
    "Alderbridge", "Ashford", "Birchdale", "Clearbrook", "Copperham", "Deerfield", "Elmhaven", "Foxbury", "Goldwick",
    "Hazelton", "Millmouth", "Northford", "Oakdale", "Ravenbrook", "Saltbury", "Silverham", "Thornton", "Winterhaven",
)  # fmt: skip
