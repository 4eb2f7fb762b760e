"""The knowledge of ``check`` about names, without JAX: the status of each, and what to write instead."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed
from xmap_compat.legacy.not_restored import why_not_restored

# The status of a use: as it was; different now; needs a hand; unknown to this JAX; impossible to follow.
WORKS, DIFFERS, CHANGE, UNKNOWN, UNSEEN = "works", "differs", "change", "unknown", "unseen"
BY_HAND = (CHANGE, UNKNOWN)
UNDER = "under xmap_compat.install()"
INSTALLED = f"as it is {UNDER}"


@dataclasses.dataclass(frozen=True)
class Advice:
    """The status of a name, and what to do.

    Attributes:
      status: WORKS, DIFFERS, CHANGE, UNKNOWN or UNSEEN.
      text: how it works, how it differs now, or what to write instead.
      heading: the section of migration_guide.md about it, if there is one.
    """

    status: str
    text: str
    heading: str = ""

    def __str__(self) -> str:
        return f'{self.text}; see "{self.heading}" in migration_guide.md' if self.heading else self.text


def _imported(name: str) -> Advice:
    return Advice(WORKS, f"{INSTALLED}, or with `from xmap_compat import {name}`")


RESTORED = Advice(WORKS, INSTALLED)
PASSED_ON = Advice(UNSEEN, "the module is used as a value, so the names read from it are unknown: check them yourself")
CODE_IN_TEXT = Advice(UNSEEN, "code in a string is not read: check it yourself")

OPTION_UNSEEN = Advice(UNSEEN, "the name of the option is not a literal here: check it yourself")


def written(replacement: str) -> Advice:
    return Advice(CHANGE, f"write {replacement}")


# ------------------------------------------------------------------------- the family of xmap

MAPS = "jax.experimental.maps"
REFUSED_NAME = Advice(CHANGE, f"it can be imported {UNDER}, and raises at use", "What install changes")
# Every public name of jax.experimental.maps: those that this package defines, and the others.
OURS = {name: name for name in ("xmap", "mesh", "Mesh", "SerialLoop", "serial_loop")}
OURS["AnonymousSerialLoop"] = "SerialLoop"
HASHABLE, HASHABLES = "collections.abc.Hashable", ("AxisName", "MeshAxisName", "ResourceAxisName")
MAPS_NAMES = {
    **{name: _imported(now) for name, now in OURS.items()},
    "Mesh": Advice(WORKS, _imported("Mesh").text, "Mesh, the object and the context"),
    **dict.fromkeys(HASHABLES, Advice(WORKS, f"{INSTALLED}, or write {HASHABLE}")),
    **dict.fromkeys(("Loop", "ResourceEnv", "EMPTY_ENV", "thread_resources", "Resource", "ResourceSet"), RESTORED),
    **dict.fromkeys(("make_xmap_callable", "xmap_p"), REFUSED_NAME),
}
PRIVATE = Advice(CHANGE, "it was internal to JAX's xmap, and nothing takes its place")
PRIVATE_MODULES = (MAPS, "jax._src.maps")  # as programs spell them: nothing here imports them
LAX_NAMES = ("pargmax", "pargmin", "pdot", "pgather", "xeinsum")
IN_BODIES = f"as it is inside xmapped functions and {UNDER}"

FAMILY = {
    MAPS: RESTORED,
    **{f"{MAPS}.{name}": advice for name, advice in MAPS_NAMES.items()},
    **{
        f"jax.lax.{name}": Advice(WORKS, f"{IN_BODIES}, or with `from xmap_compat import {name}`") for name in LAX_NAMES
    },
    "jax.interpreters.pxla.thread_resources": RESTORED,
    "jax.interpreters.pxla.Mesh": MAPS_NAMES["Mesh"],
    "jax.core.NamedShape": Advice(
        WORKS, f"{INSTALLED}, or with xmap_compat.random.NamedShape", "jax.random with a NamedShape"
    ),
}

BRACES = Advice(WORKS, f"{IN_BODIES}, or with `from xmap_compat import einsum`")
TYPE_NAMED_SHAPE = Advice(CHANGE, "write x.named_shape: today's types have no names", "named_shape in inner functions")
NO_KEYWORD = Advice(CHANGE, "xmap takes no such keyword, and never did")
NAMED_SHAPE = Advice(WORKS, "as it is inside xmapped functions", "named_shape in inner functions")
OPTION = Advice(DIFFERS, f"accepted {UNDER}, and without effect", "The experimental_xmap options")
SPMD_LOWERING = Advice(
    DIFFERS,
    f"{UNDER} it leaves the mesh axes that an xmapped function does not use to the compiler",
    "The experimental_xmap options",
)
OTHER_OPTION = Advice(DIFFERS, f"accepted {UNDER}, and without effect", "What install changes")
REDUCTIONS = ("sum", "max", "min", "mean", "var", "std", "prod", "any", "all")
NAMED_AXIS_FUNCTIONS = {
    *(f"jax.numpy.{name}" for name in REDUCTIONS),
    *(f"jax.nn.{name}" for name in ("softmax", "log_softmax", "logsumexp")),
    "jax.scipy.special.logsumexp",
}
POSITIONAL_WORDS = ("index", "columns", "rows")  # of pandas
AXIS_STRING = Advice(DIFFERS, "it names one axis, not one for each letter", "A string names one axis")
GRADIENT = Advice(DIFFERS, "the gradient is that of the positional function, exactly", "Gradients through xmap")
IGNORED = Advice(DIFFERS, "ignored, with a warning", "axis_resources for an axis that the call does not have")


def xmap_option(name: str) -> Advice:
    return SPMD_LOWERING if name == removed.SPMD_LOWERING else OPTION


# ------------------------------------------------------------------- what else JAX has removed


def of_row(row: removed.Removed | removed.Keyword) -> Advice:
    """The advice for a name or a keyword of the table that this JAX lacks."""
    if row.kind == removed.REFUSED:
        return Advice(CHANGE, f"write {row.now}; it can be imported {UNDER}, and raises at use")
    return Advice(WORKS, f"{INSTALLED}, or write {row.now}")


KEYWORDS = {
    pair: written(row.now) if row.kind == removed.REFUSED else of_row(row)
    for pair, row in removed.KEYWORDS_BY_NAME.items()
}
KEYWORDS["jax.jit", "in_axis_resources"] = written("in_shardings")
KEYWORDS["jax.jit", "out_axis_resources"] = written("out_shardings")


def unknown(jax: str, name: str, lacks: str = "have it") -> Advice:
    """The advice for something that this JAX lacks, and that is in no table."""
    why = why_not_restored(name)
    return Advice(UNKNOWN, f"jax {jax} does not {lacks}" + (why and f", and install() does not restore it: {why}"))
