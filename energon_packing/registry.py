"""What third parties may add to: families, policies, rules, layouts, executors, pack formats; and objects that a
setting names as ``my_module:MyClass``.

The first six work alike. A module of one folder declares an entry, and the folder is read, so nothing else names it. A
package outside names its entry in the entry points of its own ``pyproject.toml``, or calls the folder's ``register_*``
function.
"""

import difflib
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from energon_packing.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


@cache
def _entry_points() -> "EntryPoints":
    """Those of all installed packages; read once, since that opens the metadata of each."""
    from importlib.metadata import entry_points  # reads mail headers, whose parsers take as long

    try:
        return entry_points()
    except Exception as error:  # one malformed file of any package
        why = f"The entry points of installed packages cannot be read ({error}); reinstall them."
        raise ConfigError(why) from error


def named_object(name: str, setting: str) -> Any:
    """Returns what ``my_module:MyClass`` names; modules of the current directory are found, too, after all others.
    Raises ConfigError: the name has another form, or the module cannot be imported or has no such name."""
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.endswith(".py") or "/" in module:
        raise ConfigError(f"{setting} is {name!r}; write MODULE:NAME, such as my_module:{attribute or 'rows'}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # whatever a module does while it is imported
        raise ConfigError(f"{setting} {name} cannot be imported: {type(error).__name__}: {error}") from error


class Registry[Entry]:
    """Entries by name: those of a folder, in the order of their modules' names, then others' in order of registration.
    Modules are imported when entries are first asked for; entry points are looked for when no other entry will do, and
    each is imported when its own name, or every entry, is asked for. ``what`` is one entry, as messages call it, such
    as ``packing policy``; ``folder`` the package whose modules declare entries, such as
    ``energon_packing.packing.policies``, and the group of entry points in which others declare theirs; ``declared``
    gives the entries of one module by name, none for a module that declares none; ``setting`` is where a user writes a
    name, such as ``packing.policy``."""

    def __init__(
        self, what: str, *, folder: str, declared: Callable[[ModuleType], Mapping[str, Entry]], setting: str
    ) -> None:
        self.what, self.folder, self.declared, self.setting = what, folder, declared, setting

    @cached_property
    def _outside(self) -> "dict[str, EntryPoint]":
        return {point.name: point for point in _entry_points().select(group=self.folder)}

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for module in sorted(each.name for each in pkgutil.iter_modules(importlib.import_module(self.folder).__path__)):
            for name, entry in self.declared(importlib.import_module(f"{self.folder}.{module}")).items():
                if name in entries:
                    raise ConfigError(f"Two files of {self.folder} declare the {self.what} {name!r}.")
                entries[name] = entry
        return entries

    def __iter__(self) -> Iterator[Entry]:
        """All entries; those of entry points come last, so that who finds an earlier one does not look for them."""
        known = dict(self._entries)
        yield from known.values()
        yield from (self.find(name) for name in self._outside if name not in known)

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._entries, *self._outside]))

    def add(self, name: str, entry: Entry) -> None:
        """Registers an entry for this process. Raises `ConfigError`: the name is taken."""
        if name in self._entries:
            raise ConfigError(f"A {self.what} named {name!r} exists already; choose another name.")
        self._entries[name] = entry

    def find(self, name: str) -> Entry:
        """Returns the entry of a name. Raises `ConfigError`: there is none, or the package that declares it cannot be
        imported."""
        if name not in self._entries and (point := self._outside.get(name)) is not None:
            try:
                self._entries[name] = point.load()
            except Exception as error:
                raise ConfigError(f"The {self.what} {name!r} ({point.value}) cannot be imported: {error}") from error
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), self.names(), n=1, cutoff=0.4)
            known = ", ".join(self.names()) + "." + (f" Did you mean {near[0]!r}?" if near else "")
            raise ConfigError(f"{self.setting} is {name!r}, an unknown {self.what}; known: {known}")
        return self._entries[name]
