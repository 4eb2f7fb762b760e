"""Why a program is not patched, or one of its xmap calls stays as it is."""

# Programs and options
NO_PROGRAM = "no program is given"
NOT_READ = "{} cannot be read: {}. Nothing is run"
NO_CALL = "{name} ended {how} {when}"
BEFORE_ITS_FIRST_CALL = "before its first call of an xmapped function. Nothing is patched"
CALLED_NONE = "and called no xmapped function. Nothing is patched"
UNVERIFIED_WOULD = "; --unverified edits the xmaps that this run does not make: {}"
TOO_MANY_FILES = (
    "{folder} has more than {most} files, too many to run in a copy: start in the folder of "
    "the program"
)
INTERNAL = "leave itself fails, with {error}: please report the program. Nothing is written"

# Files
CHANGED = "{path} has changed since it was read. Nothing is written: run leave again"
READ_ONLY = (
    "{path} is read-only. Nothing is written: make it writable, or save the patch with --diff FILE"
)
UNCOMMITTED = (
    "{path} has changes that git has not committed. Nothing is written: commit them, or give "
    "--force"
)
NOT_WRITTEN = "Nothing is written: {error}"
LOST = (
    "the edited calls of xmap are not found again in {path}. Nothing is written: please "
    "report the program"
)

ENVIRONMENT = "{where} sets thread_resources.env. Nothing is written: write `with mesh:` there"
FIRST_PRINTS = "--- the program with xmap prints:"
SECOND_PRINTS = "--- the edited program prints:"
WITH_MESH = "JAX deprecates `with mesh:` ({where}): write `with jax.set_mesh(mesh):`"
STILL_NEEDS = "The program still needs xmap_compat, for {}"

# Xmap calls that stay
NOT_OF_THE_PROGRAM = (
    "it is in generated code or in another package, {file}: write it into a file of the program"
)
NO_XMAP_HERE = "no call of xmap is in this line: write `xmap(...)` where it is made"
NAMED_LOOP = (
    "its axis is on the loop {name} of `serial_loop`: write SerialLoop(length) in axis_resources"
)
EXPLICIT = (
    "the axes of its mesh are explicit: make it with axis_types=(jax.sharding.AxisType.Auto,)"
    " * number of axes"
)
GROUPS = "{where}: axis_index_groups: make two axes of the axis, and use one of them"
LACKS = (
    "the collective at {where} is over {name}, which its operand lacks, and {other}, which it"
    " has, is on the same mesh axis: give the axes other resources, or write what it "
    "computes, of one value for all elements"
)
NOT_NAMED = (
    "{where}: `{text}` is over a named axis, and the edit cannot name it: call lax.psum, "
    "lax.pmax, lax.pdot, lax.all_gather, or another collective of jax.lax, by its name"
)
OF_ONE_NAME = (
    "{where}: `{text}` names an axis that has the name of a mesh axis, and would reduce a "
    "part, silently: rename the axis or the mesh axis"
)
IN_ONE_THAT_STAYS = (
    "it is called in the body of the xmap at {where}, which stays: JAX does not nest shard_map so"
)
IN_ANOTHER_PROGRAM = (
    "{where} uses it beside an xmap, and JAX does not nest shard_map so: leave that program first"
)

# Recording and verifying
NOT_REPEATED = "a recorded call cannot be repeated: {error}"
NO_MEMORY = "the recorded arguments have more than 1 GiB: take smaller sizes"
FOUND_TO_DIFFER = "differs when it is run: {}"
AT_LINE = "differs when it is run: {} at {}: `{}`"
_LATE = "In a rule of a jax.custom_vjp"  # in an error of the helper
LATE_RULE = (
    "{}: `{}` is in a rule whose gradient is taken from outside: take the gradient in the "
    "body, or the collective out of the rule"
)
DIES = "differs when it is run: the process ends, or hangs for {seconds:.0f} s"
VERIFIED = "verified on {}"
VERIFIED_INSIDE = "verified inside of another"
NEVER_CALLED = "not verified: never called"
NEVER_MADE = "not verified: this run does not make it (--unverified edits it too)"
NOT_VERIFIED = "not verified: {}"
ENDED = "not verified: the edited program ended with {}, and the one with xmap with {}"
NO_ERROR = "no error"
NOT_MADE_AGAIN = "a recorded call is not made again"
NONE_RECORDED = "none of its calls could be recorded"


def raised(words: str, where: str, shown: str) -> str:
    """The error of an edited function, and the line of the program that raised it."""
    if _LATE in words:
        return LATE_RULE.format(where, shown)
    return AT_LINE.format(words, where, shown)
