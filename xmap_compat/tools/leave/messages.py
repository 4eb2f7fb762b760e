"""Why a program is not patched, or one of its constructions stays as it is."""

# Programs and options
NO_PROGRAM = "no program is given"
NOT_READ = "{name} cannot be read: {error}. Nothing is run"
NO_CALL = "{name} ended {how} {when}. Nothing is patched"
BEFORE_ITS_FIRST_CALL = "before its first call of an xmapped function"
CALLED_NONE = "and called no xmapped function"
TOO_MANY_FILES = "{folder} has more than {most} files, too many to run in a copy: start in the folder of the program"
INTERNAL = "leave itself fails, with {error}: please report the program. Nothing is written"

# Files
CHANGED_WHILE_IT_RAN = "{path} changed while the program ran. Nothing is written: run leave again"
CHANGED = "{path} has changed since it was read. Nothing is written: run leave again"
READ_ONLY = (
    "{path} is read-only. Nothing is written: make it writable, or save the patch with --diff FILE"
)
UNCOMMITTED = "{path} has changes that git has not committed. Nothing is written: commit them, or give --force"
NOT_WRITTEN = "Nothing is written: {error}"
DOES_NOT_COMPILE = (
    "{path} would not be valid Python: {error}. Nothing is written: please report the program"
)

ENVIRONMENT = "{where} sets thread_resources.env. Nothing is written: write `with mesh:` there"
FIRST_PRINTS = "--- the program with xmap prints:"
LEFT = "The program still needs xmap_compat, for {}"

# Constructions that are refused
NOT_OF_THE_PROGRAM = (
    "it is in generated code or in another package, {file}: write it into a file of the program"
)
RAISES = "its call raises {error}"
FAILED = "leave itself fails here, with {error}: please report the program"
NOT_MADE = "the program never makes it, and its arguments are known only then: run the program so that it does"
SEVERAL = "several calls of xmap are in this line: put each in a line of its own"
NO_XMAP_HERE = "no call of xmap is in this line: write `xmap(...)` where it is made"
NAMED_LOOP = (
    "its axis is on the loop {name} of `serial_loop`: write SerialLoop(length) in axis_resources"
)
EXPLICIT = "the axes of its mesh are explicit: make it with axis_types=(jax.sharding.AxisType.Auto,) * number of axes"
GROUPS = "axis_index_groups: make two axes of the axis, and use one of them"
LACKS = (
    "the collective at {where} is over {name}, which its operand lacks, and {other}, which it has, is on the same mesh "
    "axis: give the axes other resources, or write what it computes, of one value for all elements"
)
TAKEN = "the edited program needs the name {name} for a part of an axis, and it has one of that name: rename yours"
NOT_OF_JAX = "{called} over names, which JAX does not have: write it with lax.axis_index, lax.all_gather or lax.psum"
NOT_BY_NAME = "{called}, which is not called by its name there: write `lax.{primitive}(...)` there"
SHARES_WITH_ONE_THAT_STAYS = (
    "it shares an edited function with the xmap at {where}, which stays: write one for each"
)

# Recording and verifying
NOT_REPEATED = "a recorded call cannot be repeated: {error}"
NO_MEMORY = "its arguments are larger than --memory"
FOUND_TO_DIFFER = "differs when it is run: {}"
DIES = "differs when it is run: the process ends, or hangs for {seconds:.0f} s"
RULE = ". Is there a custom_vjp with a collective in a rule, or a layer that names an axis? Take the collective out"
NEVER_CALLED = "not verified: never called"
NOT_REACHED = "edited, not reached: {where}"
NOT_EDITED = "not edited, not reached: {where}"
NOT_VERIFIED = "not verified: {}"
ENDED = "the edited program ended with {}, and the one with xmap with {}"
NO_ERROR = "no error"
OF_ONE_NAME = (
    "{}: of one name with a mesh axis. A collective over that name which was not traced and is not edited would "
    "reduce a part, silently; if you rename the mesh axis, it raises an error"
)
TOO_FEW = "of its recorded calls, {agreed} of {recorded} were found again"
OTHERS_DIFFER = "in each round others have differed: run leave again when those are changed"
NONE_RECORDED = "none of its calls could be recorded"
