"""The words of the demo: who and what its conversations talk about. Only lists; `prose` makes sentences from them.

The demo's tokenizer is trained on text made from these lists. After changing them, run
`scripts/train_demo_tokenizer.py`, which rewrites the shipped files.
"""

from __future__ import annotations

# Far enough apart to be told apart after JPEG compression.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (46, 139, 62),
    "blue": (38, 84, 186),
    "yellow": (245, 205, 48),
    "orange": (240, 130, 30),
    "purple": (122, 52, 160),
    "pink": (240, 130, 180),
    "brown": (120, 72, 36),
    "black": (20, 20, 20),
    "white": (248, 248, 248),
    "grey": (128, 128, 128),
    "turquoise": (48, 190, 180),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "ring", "diamond", "cross", "bar")
NUMBERS: tuple[str, ...] = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
PLACES: dict[tuple[int, int], str] = {
    (0, 0): "top left", (1, 0): "top centre", (2, 0): "top right",
    (0, 1): "middle left", (1, 1): "centre", (2, 1): "middle right",
    (0, 2): "bottom left", (1, 2): "bottom centre", (2, 2): "bottom right",
}  # fmt: skip
DIRECTIONS: dict[str, tuple[int, int]] = {
    "from left to right": (1, 0),
    "from right to left": (-1, 0),
    "from top to bottom": (0, 1),
    "from bottom to top": (0, -1),
    "diagonally down to the right": (1, 1),
    "diagonally up to the right": (1, -1),
}

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

# name: (material, use, care)
TOOLS: dict[str, tuple[str, str, str]] = {
    "hammer": ("steel and ash wood", "drive nails into a board", "check that the head sits tight on the handle"),
    "saw": ("hardened steel", "cut planks to length", "keep the teeth sharp and lightly oiled"),
    "chisel": ("tool steel", "cut clean corners in wood", "grind the edge at a constant angle"),
    "compass": ("brass", "find north without a map", "store it far from magnets"),
    "microscope": ("glass and aluminium", "look at cells and crystals", "clean the lens with soft paper only"),
    "telescope": ("glass mirrors", "watch planets and distant stars", "let it cool down before you observe"),
    "kettle": ("copper or steel", "boil water for tea", "remove the lime with vinegar every month"),
    "lantern": ("tin and glass", "light a path at night", "trim the wick before each use"),
    "loom": ("beech wood", "weave threads into cloth", "keep the warp under an even tension"),
    "anvil": ("cast iron", "shape glowing metal", "never strike its bare edge with full force"),
    "bellows": ("leather and wood", "blow air into a fire", "grease the leather twice a year"),
    "barometer": ("glass and mercury", "measure the pressure of the air", "hang it upright on an inner wall"),
    "sextant": ("brass and mirrors", "measure the height of the sun above the horizon", "align the mirrors often"),
    "pulley": ("steel and nylon", "lift a heavy load with less force", "inspect the rope for worn fibres"),
}

# name: (ingredients, steps)
DISHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vegetable soup": (
        ("carrots", "onions", "celery", "potatoes", "salt"),
        ("Chop the vegetables", "fry the onions gently", "add water and potatoes", "simmer for half an hour"),
    ),
    "pancakes": (
        ("flour", "milk", "eggs", "butter", "sugar"),
        ("Whisk eggs and milk", "stir in the flour", "let the batter rest", "bake thin cakes in hot butter"),
    ),
    "rice with beans": (
        ("rice", "black beans", "garlic", "cumin", "coriander"),
        ("Soak the beans overnight", "boil them until soft", "toast the rice with garlic", "mix and season"),
    ),
    "apple pie": (
        ("apples", "flour", "butter", "cinnamon", "lemon juice"),
        ("Make a dough and chill it", "slice the apples", "fill the tin", "bake until the crust is golden"),
    ),
    "tomato pasta": (
        ("pasta", "tomatoes", "basil", "olive oil", "garlic"),
        ("Warm the oil with garlic", "add tomatoes and cook them down", "boil the pasta", "toss with basil"),
    ),
    "lentil stew": (
        ("lentils", "carrots", "bay leaves", "mustard", "vinegar"),
        ("Rinse the lentils", "cook them with carrots and bay leaves", "stir in mustard", "finish with vinegar"),
    ),
    "flat bread": (
        ("flour", "yoghurt", "yeast", "salt", "sesame"),
        ("Knead the dough", "let it rise until doubled", "roll it thin", "bake it on a very hot stone"),
    ),
    "mushroom omelette": (
        ("eggs", "mushrooms", "chives", "butter", "pepper"),
        ("Fry the mushrooms until dry", "beat the eggs", "pour them into the pan", "fold and serve at once"),
    ),
}

# name: (explanation, example, limit)
CONCEPTS: dict[str, tuple[str, str, str]] = {
    "a hash table": (
        "it stores values under keys and finds each one in nearly constant time",
        "a phone book that opens at the right page by itself",
        "it keeps no order and wastes some memory",
    ),
    "a binary search": (
        "it halves a sorted list again and again until the value is found",
        "looking up a word in a dictionary",
        "the list must be sorted first",
    ),
    "a queue": (
        "the element that entered first also leaves first",
        "people waiting at a bakery",
        "reaching the middle of it takes many steps",
    ),
    "recursion": (
        "a function solves a problem by calling itself on a smaller part of it",
        "walking through a tree of folders",
        "without a base case it never ends",
    ),
    "a checksum": (
        "a short number is computed from a file so that damage can be noticed",
        "the last digit on a bank card",
        "it detects accidents but does not stop an attacker",
    ),
    "a gradient": (
        "it points in the direction in which a function grows fastest",
        "the steepest way up a hill",
        "it only knows the neighbourhood of a point",
    ),
    "sequence packing": (
        "several short samples share one long row so that little padding is computed",
        "filling a suitcase with small parcels",
        "attention must not cross the border between two samples",
    ),
    "a cache": (
        "results that were expensive are kept close at hand for the next time",
        "a notebook with the phone numbers that you use most",
        "old entries must be thrown away at the right moment",
    ),
    "evaporation": (
        "fast molecules leave the surface of a liquid and become vapour",
        "wet laundry that dries in the wind",
        "it slows down when the air is already humid",
    ),
    "friction": (
        "two surfaces that slide over each other resist the motion and grow warm",
        "rubbing your hands in winter",
        "too little of it makes walking impossible",
    ),
    "photosynthesis": (
        "green plants make sugar from light, water and carbon dioxide",
        "a leaf that works like a tiny kitchen powered by the sun",
        "it needs light, so it stops at night",
    ),
    "inflation": (
        "prices rise in general, so the same money buys less than before",
        "a loaf of bread that costs more every year",
        "a single price that rises is not enough to speak of it",
    ),
    "a lunar eclipse": (
        "the earth stands between the sun and the moon and throws its shadow on the moon",
        "a ball that passes behind a lamp shade",
        "it can only happen at full moon",
    ),
    "erosion": (
        "wind, water and ice carry soil and rock away little by little",
        "a river that cuts a valley",
        "roots of plants slow it down",
    ),
}

# (name of a function, what it does, body lines)
FUNCTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("mean", "returns the average of a list", ("total = sum(values)", "return total / len(values)")),
    ("largest", "returns the largest value of a list",
     ("best = values[0]", "for value in values:", "    if value > best:", "        best = value", "return best")),
    ("count_even", "counts the even numbers of a list",
     ("count = 0", "for value in values:", "    if value % 2 == 0:", "        count += 1", "return count")),
    ("reverse", "returns the list in reverse order", ("return list(reversed(values))",)),
    ("running_sum", "returns the running sum of a list",
     ("total = 0", "result = []", "for value in values:", "    total += value", "    result.append(total)",
      "return result")),
    ("without_duplicates", "removes duplicates and keeps the order",
     ("seen = set()", "result = []", "for value in values:", "    if value not in seen:", "        seen.add(value)",
      "        result.append(value)", "return result")),
    ("clamp_all", "limits every value to the range from 0 to 100",
     ("return [min(max(value, 0), 100) for value in values]",)),
)  # fmt: skip

FIRST_NAMES: tuple[str, ...] = (
    "Ada", "Amir", "Bela", "Carla", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena",
    "Marta", "Nils", "Olga", "Paulo", "Rosa", "Samir", "Tove", "Uma", "Viktor", "Wanda", "Yuki", "Zoe",
)  # fmt: skip
TOWN_HEADS: tuple[str, ...] = (
    "Alder", "Ash", "Birch", "Black", "Bright", "Clear", "Copper", "Deer", "East", "Elm", "Fair", "Fox", "Gold",
    "Green", "Hazel", "High", "Iron", "Lake", "Long", "Marsh", "Mill", "North", "Oak", "Raven", "Red", "River",
    "Salt", "Silver", "Stone", "Summer", "Thorn", "West", "White", "Willow", "Winter", "Wolf",
)  # fmt: skip
TOWN_TAILS: tuple[str, ...] = (
    "bridge",
    "brook",
    "bury",
    "dale",
    "field",
    "ford",
    "ham",
    "haven",
    "mouth",
    "ton",
    "wick",
)
WEEKDAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
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
