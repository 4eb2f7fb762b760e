"""What names mean in a written program: where others of the same name are, and where modules change while they run."""

import ast
import functools
import importlib
import math
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_source import assert_close, check, normal, refused, resources_of, run, source_of

from xmap_compat import pgather, xmap

X = normal(8)
HEAD = "import functools\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax\n"

# Each defines f(x) over the axis i; beside it, what it gives for the whole array.
SCOPES = {
    "a parameter of a function inside": (
        """
        scale = 3.0
        def f(x):
            def doubled(scale):
                return scale * 2
            return doubled(lax.psum(x, "i")) * scale
        """,
        lambda x: np.full(8, x.sum() * 6),
    ),
    "a variable of a comprehension": (
        """
        k = 5.0
        def f(x):
            return sum(k * x for k in (1.0, 2.0)) + k * lax.psum(x, "i")
        """,
        lambda x: 3 * x + 5 * x.sum(),
    ),
    "a name of an exception, and of patterns": (
        """
        n, e = 100.0, 2.0
        def f(x, mode=("sum", 3)):
            try:
                raise ValueError("i")
            except ValueError as error:
                name = str(error)
            match mode:
                case ("sum", n):
                    return lax.psum(x, name) * n * e
                case [first, *others] | {"k": first, **others}:
                    return x
        """,
        lambda x: np.full(8, x.sum() * 6),
    ),
    "a name of a class, which its methods do not see": (
        """
        k, name = 2.0, "i"
        class C:
            k, name = 5.0, "j"
            def go(self, x):
                return lax.psum(x, name) * k * self.k
        def f(x):
            return C().go(x)
        """,
        lambda x: np.full(8, x.sum() * 10),
    ),
    "a walrus in a comprehension, and a parameter called lax": (
        """
        def f(x):
            ys = [(last := lax.psum(x * a, "i")) for a in (1.0, 2.0)]
            return last + (lambda lax: lax * 2)(ys[0])
        """,
        lambda x: np.full(8, x.sum() * 4),
    ),
    "an import in the function, and modules that are built in": (
        """
        import sys
        from time import get_clock_info
        def f(x):
            assert sys.byteorder and get_clock_info("time").monotonic is not None
            from jax import lax as inside
            import jax.lax as again
            return inside.psum(x, "i") + again.pmean(x, "i")
        """,
        lambda x: np.full(8, x.sum() + x.mean()),
    ),
    "two recursive functions of one name": (
        """
        def maker(k):
            def go(x, n):
                return x * k if n == 0 else lax.psum(go(x, n - 1), "i")
            return go
        a, b = maker(2.0), maker(3.0)
        def f(x):
            return a(x, 1) + b(x, 2)
        """,
        lambda x: np.full(8, x.sum() * 26),
    ),
    "defaults of loops, and of names that changed": (
        """
        k = 3.0
        def g(x, by=k, *, name="i", act=lambda v: v * 2):
            return act(lax.psum(x, name)) * by
        k = 4.0
        made = [lambda x, n=n, *, m=m: lax.psum(x, "i") * n * m for n, m in ((2.0, 1.0), (3.0, 5.0))]
        def f(x):
            return g(x) + made[1](x) + k
        """,
        lambda x: np.full(8, x.sum() * 21 + 4),
    ),
    "a name of an axis in a dictionary, given to partial": (
        """
        NAMES = {"data": "i"}
        def f(x):
            return jax.tree.map(functools.partial(lax.pmean, axis_name=NAMES["data"]), {"x": x})["x"]
        """,
        lambda x: np.full(8, x.mean()),
    ),
    "texts of several lines, and lines with less indentation": (
        '''
        def made():
            if True:
                def f(x):
                    """What it does,
          and more.
                    """
                    line = """
            of
          several"""
                    return lax.psum(x, "i"
            ) * len(line)
                return f
        f = made()
        ''',
        lambda x: np.full(8, x.sum() * len("\n    of\n  several")),
    ),
    "blanks in definitions, and letters that Python reads as others": (
        """
        def  g (x):
            s = "a\x0cb\u2028c"; return lax.psum(x, "i") * len(s)  # \x0c
        class  C :
            def\tﬁt(self, x): return g(x)
        def ﬁt(x): return C().ﬁt(x)
        f = ﬁt
        """,
        lambda x: np.full(8, x.sum() * 5),
    ),
    "names of libraries that mean something else by now": (
        """
        from time import sleep
        from jax.lax import sin
        L = lax
        class lax: sum = 2.0
        sleep = lambda seconds: 0
        def f(x):
            sleep(1e9)
            return L.psum(sin(x), "i") * lax.sum
        """,
        lambda x: np.full(8, np.sin(x).sum() * 2),
    ),
    "builtins of one's own, which helpers call as well": (
        """
        def sum(x): return x * 7
        def map(x): return x + 1
        def len(x): return x - 1
        isinstance, tuple, zip, divmod, range, enumerate = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
        def f(x):
            more = isinstance + tuple + zip + divmod + range + enumerate + lax.all_gather(x, "i").sum()
            return map(sum(len(lax.ppermute(x, "i", [(0, 1)])))) + lax.pmax(x, "i") + more
        """,
        lambda x: 7 * (np.eye(8)[1] * x[0] - 1) + x.max() + x.sum() + 22,
    ),
    "variables with the names of helpers": (
        """
        def g(max_over, split_axes): return lax.pmax(max_over, split_axes)
        class C:
            max_over = 2.0
            def go(self, x, max_over=max_over): return lax.pmax(x, "i") * max_over + self.max_over
        def f(x):
            def softmax_over(v): return jax.nn.softmax(v, "i")
            ppermute = lax.ppermute(x, "i", [(0, 1)])
            return g(x, "i") + C().go(x) + softmax_over(x) + ppermute
        """,
        lambda x: x.max() * 3 + 2 + np.exp(x) / np.exp(x).sum() + np.eye(8)[1] * x[0],
    ),
    "partial calls of collectives": (
        """
        NAMES = ("i",)
        total = functools.partial(lax.psum, axis_name="i")
        mean: object = functools.partial(lax.pmean, axis_name=NAMES)
        index = functools.partial(lax.axis_index, "i")
        def f(x):
            return total(x) + mean(x) * index() + jax.tree.map(total, [x])[0]
        """,
        lambda x: 2 * x.sum() + x.mean() * np.arange(8),
    ),
    "keywords of functions that a helper stands for": (
        """
        def f(x):
            return jnp.min(a=x, axis="i") + jax.nn.logsumexp(axis="i", a=x) + lax.pmax(axis_name="i", x=x)
        """,
        lambda x: np.full(8, x.min() + np.log(np.exp(x).sum()) + x.max()),
    ),
    "a rule of a function that is made for an axis": (
        """
        def made_for(name):
            @jax.custom_vjp
            def total(x):
                return lax.psum(x, name)
            total.defvjp(lambda x: (lax.psum(x, name), None), lambda _, ct: (ct,))
            return total
        total = made_for("i")
        def f(x):
            return total(x * x) * x
        """,
        lambda x: (x * x).sum() * x,
    ),
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes and imports a module of the user's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(text))
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["vmap", "devices"])
@pytest.mark.parametrize("name", SCOPES)
def test_a_name_means_what_it_means_where_it_stands(name, place, module):
    text, oracle = SCOPES[name]
    body = module(f"scoped_{list(SCOPES).index(name)}", text).f
    check(body, ["i"], ["i"], {"i": "x"} if place == "devices" else {}, (X,), oracle(X))


def again(*modules):
    """Import modules as a new process would."""
    for module in modules:
        importlib.reload(module)


def test_what_a_module_does_not_give_a_new_process_is_written(module):
    config = module(
        "config",
        """
        scale, table, act, kept = 2.0, {"a": 1.5}, jnp.sin, 0.5
        settled = 0.25
        def scaled(x):
            return x * scale * table["a"]
        def fine(x):
            return x * settled
        class Factor:
            k = 2.0
            def by(self, x):
                return x * self.k
        """,
    )
    program = module(
        "program",
        """
        import config
        from config import Factor, fine, scaled, table
        def f(x):
            return lax.psum(scaled(x) + config.act(x) + fine(x), "i") + config.scale + table["a"] + Factor().by(x)
        """,
    )
    config.scale, config.act, config.table["a"] = 3.0, jnp.tanh, 4.0
    total = (12 * X + np.tanh(X) + 0.25 * X).sum()
    text = source_of(program.f, ["i"], ["i"], {"i": "x"}, (X,))
    imports = [n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.module == "config"]
    assert sorted(a.name for n in imports for a in n.names) == ["Factor", "fine"]
    again(config)
    assert_close(run(text)(X), total + 7 + 2 * X)
    program.Factor.k = 7.0
    with pytest.raises(NotImplementedError, match="computes something else: it lacks mul"):
        source_of(program.f, ["i"], ["i"], {"i": "x"}, (X,))


@pytest.mark.parametrize("place", ["none", "part", "full"])
def test_what_a_module_has_from_one_with_collectives_is_written(place, module):
    module("operations", 'def total(x):\n    return lax.psum(x, "i")')
    module("layers", "from operations import total\ndef dense(x):\n    return total(x) * 2")
    module("exported", "from layers import dense")
    net = module(
        "net", "from exported import dense as layer\ndef net(x, again=layer):\n    return layer(x) + again(x)"
    ).net
    check(net, ["i"], ["i"], resources_of("i", place), (X,), np.full(8, X.sum() * 4))


def test_what_modules_hold_that_need_xmap_is_written(module):
    model = module(
        "model",
        """
        from xmap_compat import xmap
        NAME, EPS = "i", 0.5
        def normal(x):
            return x / (lax.psum(x * x, NAME) + EPS)
        class Dense:
            def __init__(self, w):
                self.w = w
            def __call__(self, x):
                return normal(x * self.w)
        dense = Dense(2.0)
        """,
    )
    program = module(
        "program",
        """
        import model
        from model import dense
        def f(x):
            return model.normal(x) + dense(x) + model.dense(x) * model.EPS
        """,
    )
    with_w = lambda w: X * w / ((X * w) ** 2).sum().__add__(0.5)
    text = check(program.f, ["i"], ["i"], {"i": "x"}, (X,), with_w(1) + 1.5 * with_w(2))
    assert "model.normal\n" in text and model.EPS == 0.5


def rolled(x):
    return [(k, (k + 5) % x.shape[-1]) for k in range(x.shape[-1])]


def shuffled(x):
    return [(7 * k + 3) % x.shape[-1] for k in range(x.shape[-1])]


# Over two axes, each with what it does to an array of all elements.
IN_ORDER = {
    "ppermute": (lambda x, names: lax.ppermute(x, names, rolled(x)), lambda x: jnp.roll(x, 5, 0)),
    "pshuffle": (lambda x, names: lax.pshuffle(x, names, shuffled(x)), lambda x: x[np.array(shuffled(x))]),
    "psum_scatter": (lambda x, names: lax.psum_scatter(x, names), lambda x: x.sum(0)),
    "psum_scatter, tiled": (lambda x, names: lax.psum_scatter(x, names, tiled=True), lambda x: x.sum(0)[:, None]),
    "all_to_all": (lambda x, names: lax.all_to_all(x, names, 0, 0), lambda x: x.T),
    "all_to_all, tiled": (lambda x, names: lax.all_to_all(x, names, 0, 0, tiled=True), lambda x: x.T),
    "pswapaxes": (lambda x, names: lax.pswapaxes(x, names, 0), lambda x: x.T),
    "all_gather": (lambda x, names: lax.all_gather(x[0], names) * x, lambda x: x[:, 0] * x),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (4, 2)], ids=str)
@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_an_order_over_axes_that_both_have_a_part_on_each_device(name, names, shape):
    """Elements are counted along the first axis first, on whichever devices and in whichever slots they are."""
    body, of_all = IN_ORDER[name]

    def oracle(x):
        major = "ab".index(names[0])
        flat = of_all(x.swapaxes(0, major).reshape(-1, x.shape[-1]))
        return flat.reshape(shape[major], -1, *flat.shape[1:]).swapaxes(0, major)

    x, spec = normal(*shape, math.prod(shape)), ["a", "b", ...]
    weights = normal(*oracle(x).shape, seed=3)
    text = check(lambda x: body(x, tuple(names)), spec, spec, {"a": "x", "b": "y"}, (x,), oracle(x))
    found, expected = (jax.grad(lambda x, f=f: jnp.sum(weights * f(x) ** 2))(x) for f in (run(text), oracle))
    assert_close(jax.block_until_ready(found), expected)


@pytest.mark.parametrize("resources", [{}, {"a": "x", "b": "y"}, {"a": "x", "c": "y"}, {"b": ("y", "x")}], ids=str)
def test_an_index_over_three_axes(resources):
    x = normal(4, 8, 6)
    oracle = x * np.arange(x.size).reshape(8, 6, 4).transpose(2, 0, 1)
    check(lambda x: x * lax.axis_index(("b", "c", "a")), [*"abc"], [*"abc"], resources, (x,), oracle)


@pytest.mark.parametrize("place", ["none", "part", "full"])
def test_swapped_dimensions_of_an_array_that_is_equal_along_the_axis(place):
    """Under jax.vmap, JAX gives such an array another shape."""
    body = lambda x: lax.pswapaxes(x, "i", 0) * jnp.arange(8.0)
    oracle = X[:, None] * np.arange(8.0)
    check(body, [...], ["i", ...], resources_of("i", place), (X,), oracle, axis_sizes={"i": 8})


TREES = {
    "all_gather": lambda tree: lax.all_gather(tree, "i"),
    "all_to_all": lambda tree: lax.all_to_all(tree, "i", 0, 0),
    "pbroadcast": lambda tree: lax.pbroadcast(tree, "i", 5),
    "pmax": lambda tree: lax.pmax(tree, "i"),
    "ppermute": lambda tree: lax.ppermute(tree, "i", [(0, 2)]),
    "pshuffle": lambda tree: lax.pshuffle(tree, "i", [*range(8)][::-1]),
    "psum_scatter": lambda tree: lax.psum_scatter(tree, "i", tiled=True),
    "pswapaxes": lambda tree: lax.pswapaxes(tree, "i", 0),
}


@functools.cache
def of_each_leaf(name):
    def oracle(x):
        of = xmap(TREES[name], ["i", ...], ["i", ...])
        return of(x) + 2 * of(x * x) - 3 * of(np.tile(np.arange(8.0, dtype=np.float32), (8, 1)))

    return jax.jit(oracle)(normal(8, 8))


@pytest.mark.parametrize("place", ["none", "part", "full"])
@pytest.mark.parametrize("name", TREES)
def test_a_collective_over_a_pytree(name, place):
    def body(x):
        found = TREES[name]({"a": x, "b": (x * x, np.arange(8.0, dtype=np.float32))})
        return found["a"] + 2 * found["b"][0] - 3 * found["b"][1]

    check(body, ["i", ...], ["i", ...], resources_of("i", place), (normal(8, 8),), of_each_leaf(name))


def test_elements_of_an_array_without_dimensions():
    check(lambda x: pgather(x, 3, "i") + pgather(src=x, idx=5, axes="i"), ["i"], {}, {}, (X,), X[3] + X[5])


@pytest.mark.parametrize("place", ["none", "part"])
def test_a_collective_in_a_text_with_values_in_it(place):
    def body(x):
        return lax.psum(x, "i") * float(f"{lax.psum(1, 'i')}")

    given = (body, ["i"], ["i"], resources_of("i", place), (X,))
    if place == "none" or sys.version_info >= (3, 12):
        check(*given, np.full(8, X.sum() * 8))
    else:
        assert "not valid Python after it is rewritten" in refused(*given)


@pytest.mark.parametrize("place", ["none", "part", "full"])
def test_the_derivative_of_a_branch_that_not_all_devices_take(place):
    """With types JAX would sum the cotangent of what is the same on all devices inside of the branch, and wait."""

    def body(x):
        total = lax.psum(x, "i")
        return lax.cond(x > 0, lambda v: v * total, jnp.sin, x)

    resources = resources_of("i", place)
    text = check(body, ["i"], ["i"], resources, (X,), np.where(X > 0, X * X.sum(), np.sin(X)))
    oracle = lambda x: jnp.where(x > 0, x * x.sum(), jnp.sin(x)).sum()
    assert_close(jax.grad(lambda x: run(text)(x).sum())(X), jax.grad(oracle)(X))


def test_a_refusal_says_where():
    def body(x):
        given = (x, "i")
        return lax.psum(*given)

    f = xmap(body, ["i"], ["i"])
    with pytest.raises(
        NotImplementedError, match=r"unpacked arguments: lax\.psum\(\*given\).* \(test_source_names\.py:\d+\)"
    ):
        f.plan(X).source()
