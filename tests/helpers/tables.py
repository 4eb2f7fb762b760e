"""Tables of one-line functions, written as their expressions: ``sine: jnp.sin(v) + w``."""


def expressions(text, parameters, names):
    """``{name: function}`` of lines ``name: expression``.

    Args:
      parameters: of each function, as in a ``lambda``.
      names: what the expressions mention: ``globals()``, mostly.
    """
    functions = {}
    for line in text.strip().splitlines():
        name, expression = line.split(": ", 1)
        functions[name] = eval(f"lambda {parameters}: {expression}", names)
    return functions
