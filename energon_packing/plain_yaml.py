"""YAML -> plain values. PyYAML accepts a key that occurs twice (the last value counts), aliases that name the same part
exponentially often, and integers of thousands of digits, which overflow wherever they become floats. `load_yaml`
refuses them with the line."""

from typing import Any

LARGEST_TEXT = 64 * 2**20  # bytes of a file; lists of shards are the longest that are read
FAST_FROM = 2**16
"""Characters from which libyaml parses, if PyYAML was built with it: its messages are terser, and it is ten times as
fast. Nodes are made by Python's composer all the same, as fast: libyaml's own ends the process where they lie deep."""
MOST_VALUES = 100_000  # values of a configuration with each alias counted as what it names
MOST_OF_DATA = 5_000_000  # the same for a metadataset or a list of shards
LONGEST_NUMBER = 64  # characters of a number


def load_yaml(text: str, *, most_values: int = MOST_VALUES) -> Any:
    """Returns the plain values of a YAML text, ``most_values`` at most, with each alias counted as what it names;
    everything that `yaml.safe_load` refuses is refused too. Raises yaml.YAMLError: it is not YAML, or a key occurs
    twice, a number is too long, or aliases repeat too much; it has the place (``problem_mark``); ValueError: it is too
    long, or holds an impossible date; RecursionError: it is nested too deeply."""
    import yaml

    if len(text) > LARGEST_TEXT:
        raise ValueError(f"it is longer than {LARGEST_TEXT:,} characters")
    parser: Any = yaml.SafeLoader if len(text) < FAST_FROM else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    composer = {name: part for name, part in vars(yaml.composer.Composer).items() if not name.startswith("__")}
    loader: Any = type("Loader", (parser,), {**composer, "anchors": {}})(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _values_of(node, {}, most_values)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_of(node: Any, known: dict[int, int | None], most: int) -> int:
    """Counts the values of a node, aliases expanded, and checks each node once."""
    import yaml

    def refused(problem: str, place: Any = node) -> Exception:
        return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)

    if id(node) in known:
        if (before := known[id(node)]) is None:
            raise refused("a value that contains itself")
        return before
    known[id(node)] = None
    inner: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
        raise refused(f"a number of {len(node.value)} characters; at most {LONGEST_NUMBER} are read")
    if isinstance(node, yaml.MappingNode):
        seen: set[tuple[str, str]] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if (key.tag, key.value) in seen and not key.tag.endswith(":merge"):
                raise refused(f"the key {key.value[:60]!r} occurs twice", key)
            seen.add((key.tag, key.value))
        inner = [each for pair in node.value for each in pair]
    count = 1 + sum(_values_of(each, known, most) for each in inner)
    if count > most:
        raise refused(f"more than {most:,} values, each alias counted as what it names")
    known[id(node)] = count
    return count
