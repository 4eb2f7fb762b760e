"""What messages should not show: found in each one that a test raises, built with its real arguments."""

import functools
import importlib
import re
import sys

from messages import ROOT, functions

# Places where an argument was empty, or a part is missing.
_HOLES = re.compile(r"\S  +\S| [,;.](?!\.)(\s|$)|[,:;] ?[,;.](?!\.)|\( | \)|``|:\s*$")
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]+`")
_PAIRS = {")": "(", "]": "[", "}": "{"}


def faults(text):
    """Double spaces, empty lists and stray brackets in a message, beside what it quotes or shows on its own lines."""
    plain = _QUOTED.sub("x", text.split("\nLegacy's words")[0].split("\n  ")[0])
    found = [hole.group() for line in plain.splitlines() if (hole := _HOLES.search(line.strip()))]
    open_ones = []
    for sign in re.findall(r"[()\[\]{}]", plain):
        if sign not in _PAIRS:
            open_ones.append(sign)
        elif not open_ones or open_ones.pop() != _PAIRS[sign]:
            return [*found, sign]
    return [*found, *open_ones]


def watch_messages(told):
    """Have each message that the package makes looked through; those with faults are appended to ``told``."""
    for module, name in makers():
        setattr(module, name, _watched(getattr(module, name), told))


def makers():
    """``(module, name)`` wherever the package holds a function that makes a message."""
    homes = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), function.name)
        for path, function in functions()
    ]
    homes.append(("xmap_compat.core.errors", "should_be"))
    made = {id(getattr(importlib.import_module(module), name)) for module, name in homes}
    modules = [module for name, module in sys.modules.items() if name.startswith("xmap_compat")]
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if id(value) in made
    ]


def _watched(function, told):
    @functools.wraps(function)
    def watched(*args, **kwargs):
        made = function(*args, **kwargs)
        if found := faults(str(made)):
            told.append((function.__name__, found, str(made)))
        return made

    return watched
