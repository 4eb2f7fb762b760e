"""Why a program is not patched, or one of its xmap calls stays as it is."""

# Programs and files
NO_PROGRAM = "no program is given"
NOT_READ = "{} cannot be read: {}. Nothing is run"
NO_CALL = "{name} ended {how} and called no xmapped function. Nothing is patched"
TOO_LARGE = (
    "{folder} has more than {most} GiB, too much to run in a copy: keep data elsewhere, and start "
    "in the folder of the program"
)
INTERNAL = "leave itself fails, with {error}: please report the program. Nothing is written"
CHANGED = "{path} has changed since it was read. Nothing is written: run leave again"
NOT_WRITTEN = "Nothing is written: {error}"
NOT_OURS = "{path} is a file of the program, and leave writes one of this name: rename it"
FIRST_PRINTS = "--- the program with xmap prints:"
SECOND_PRINTS = "--- the edited program prints:"
STILL_NEEDS = "The program still needs xmap_compat, for {}"

# Xmap calls that stay
NOT_OF_THE_PROGRAM = (
    "it is in generated code or in another package, {file}: write it into a file of the program"
)
NO_XMAP_HERE = (
    "no call of xmap is in this line: import xmap in this file, and write `xmap(...)` where it is "
    "made"
)
NOT_MADE = "this run does not make it: leave the program that does"
UNEDITED = (
    "{where} names an axis in a call that stays, and a mesh axis has the same name: the call would "
    "reduce a part. Rename one of them"
)
SHARED_MESH_AXIS = (
    "its axes {name} and {other} are on one mesh axis, {mesh_axis}, and a collective over one "
    "may reduce the other: give one of them another resource, or none"
)
IN_ONE_THAT_STAYS = "it is called in the body of the xmap at {where}, which stays"
IN_ANOTHER_PROGRAM = (
    "{name} uses it beside an xmap, and JAX does not nest shard_map so: leave that program first"
)
NOT_REPEATED = "a recorded call cannot be repeated: {error}"
NONE_RECORDED = "none of its calls was executed"
DIFFERS = "differs when it is run: {}"
ENDED = "not verified: the edited program ended with {}, and the one with xmap with {}"
NO_ERROR = "no error"
NOT_MADE_AGAIN = "a recorded call is not made again"

# What an error of an edited function says, and the remedy
_REMEDIES = {
    "In a rule of a jax.custom_vjp": "this is in a rule whose gradient is taken from outside: take "
    "the gradient in the body, or the collective out of the rule",
    "unbound axis name": "the edit cannot name it: call lax.psum, lax.pmax, lax.pdot, "
    "lax.all_gather, or another collective of jax.lax, by its name",
    "axis_index_groups": "make two axes of the axis, and use one of them",
}

# Xmap calls that do not
VERIFIED = "verified on {}"
VERIFIED_INSIDE = "verified inside of another"
NEVER_CALLED = "not verified: this run does not call it"


def raised(error: str, line: str) -> str:
    """The error of an edited function, with the line of the program that raised it."""
    words = f"it raises {error}{line}"
    for part, remedy in _REMEDIES.items():
        if part in error:
            words += f": {remedy}"
            break
    return DIFFERS.format(words)
