"""Why a program is not patched, or one of its constructions stays as it is."""

# Programs and options
UNKNOWN_OPTION, NO_PROGRAM = "unknown option: {}", "no program is given"
TAKES = "{option} takes {what}, but got {value!r}"
GIVEN_TO_THE_PROGRAM = "leave: {option} stands after the program, which gets it: for leave, write it before"
NOT_PYTHON = "{name} is not valid Python: {error}. Nothing is run"
NOT_READ = "{name} cannot be read: {error}"
NO_CALL = "{name} ended {how} {when}. Nothing is patched"
BEFORE_ITS_FIRST_CALL = "before its first call of an xmapped function"
CALLED_NONE = "and called no xmapped function"
TOO_MANY_FILES = "{folder} has more than {most} files, too many to run in a copy: start in the folder of the program"

# Files
CHANGED_WHILE_IT_RAN = "{path} changed while the program ran. Nothing is written: run leave again"
CHANGED = "{path} has changed since it was read. Nothing is written: run leave again"
READ_ONLY = "{path} is read-only. Nothing is written: make it writable, or save the patch with --diff FILE"
UNCOMMITTED = "{path} has changes that git has not committed. Nothing is written: commit them, or give --force"
NOT_WRITTEN = "Nothing is written: {error}"

LEFT = "The program still needs xmap_compat, for {}"

# Constructions that are refused
GENERATED_CODE = "generated code ({file}) makes it: write it into a file"
OF_ANOTHER_PACKAGE = "it is in a file of another package, {file}: change it there, or copy that file"
NEVER_CALLED = "the program never calls it: run the program so that it does, or remove it"
RAISES = "its call raises {error}"
FAILED = "leave itself fails here, with {error}: please report the program"
DIFFERS = "it differs when it is run"
SEVERAL = "several calls of xmap are in this line: put each in a line of its own"
NO_XMAP_HERE = "no call of xmap is in this line: write `xmap(...)` where it is made"
UNPACKED = "unpacked arguments of xmap: write them out"
DOES_MORE = "{} in its arguments may do something else too, which would be lost: assign it to a variable before"
DIFFERENT_AXES = "this line makes xmaps that differ in their axes: write one call of xmap for each"
UNKNOWN_ARGUMENT = "the argument {} of xmap, which jax.jit does not have"
DIFFERENT_TEXTS = "its calls need different texts, as their meshes or sizes differ: write one xmap for each"
INSIDE_AND_OUTSIDE = "gradients inside and outside need two texts of its rules or contractions: write two functions"
NAME_OF_A_MESH_AXIS = (
    "the axis {name} has the name of a mesh axis that is another one, and a missed place is no error: rename it"
)
EXPLICIT = "the axes of its mesh are explicit: make it with axis_types=(jax.sharding.AxisType.Auto,) * number of axes"
NO_STRING = "its axis {name} is not a string, and an expression has its name in some function: name it by a string"
CLASS_WITHOUT_NAME = "its specs are in a {name}, a class that its file does not name: import it there"
RULE_NOT_FOUND = "a backward rule with collectives, whose `defvjp` is not found"
SHARES = (
    "it needs another text of a function than the xmap at {where}. Assignments: {kinds}: {what}, or write two functions"
)
SHARES_A_NAME = (
    "its axis {name}, whose name is a variable in some function, is split otherwise in the xmap at {where}, and one "
    "table of names serves both. Assignments: {kinds}: {what}, or rename the axis in one of the two"
)
CHOOSE, CHOSEN = "choose one with --assignment", "with --assignment {} this one cannot run any more: remove it"
SHARES_WITH_ONE_THAT_STAYS = "it shares a function with the xmap at {where}, which stays: write one for each"
IN_ONE_THAT_STAYS = "it is called in the body of an xmap that stays"

# Recording and verifying
NO_PLAN = "it has no plan: {error}"
NOT_REPEATED = "a recorded call cannot be repeated: {error}"
NO_MEMORY = "its arguments are larger than --memory"
FOUND_TO_DIFFER = "differs when it is run: {}"
COMPUTES_ANOTHER = "its edited functions compute something else: {}"
NOT_AS_BEFORE = "its own functions are traced otherwise now: {}"
NOT_FOUND_AGAIN = "{name} is not found in the edited text"
INNER_ON_THE_MESH = "an xmap in its body is on axes of the mesh"
NOT_VERIFIED = "not verified: {}"
ENDED = "the edited program ended with {}, and the one with xmap with {}"
NO_ERROR = "no error"
WHILE_JAX_TRACES = (
    "A mesh is entered at {} while JAX traces, and jax.set_mesh cannot be: enter it around jax.grad, jax.jit"
)
NOT_BY_WITH = "A mesh is entered at {} without `with`, which is not edited: write `with mesh:`, or jax.set_mesh(mesh)"
TOO_FEW = "of its recorded calls, {agreed} of {recorded} were found again"
OTHERS_DIFFER = "in each round others have differed: run leave again when those are changed"
NONE_RECORDED = "none of its calls could be recorded"
