"""Contractions of named axes: einsum with braces, ``xeinsum`` and ``pdot``, beside ``jnp.einsum`` in positions.

The rival on a mesh does what one would write by hand: ``jnp.einsum`` of what a device holds, then one sum over the
mesh axes of whatever is contracted.  Every product is compared with its gradients (both transposed programs, for a
given cotangent), in float32 and in bfloat16 with float32 accumulation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import MESH_AXES, MESH_SHAPE, Case, arrays, sharded, title
from xmap_compat import pdot, xmap
from xmap_compat.lax import xeinsum

SIZES = {"b": 8, "h": 4}  # of batches and heads; everything else has:
SIZE = 16


@dataclasses.dataclass(frozen=True)
class Form:
    """One contraction.

    Attributes:
      name: for the table.
      positions: subscripts for ``jnp.einsum``; a letter that is also in ``names`` is a named axis for xmap.
      names: the named axes, a letter each.
      call: contracts the operands without their named dimensions.
      accumulates: whether ``call`` takes ``preferred_element_type``.
    """

    name: str
    positions: str
    names: str
    call: Callable[..., Any]
    accumulates: bool = True

    @property
    def inputs(self) -> list[str]:
        return self.positions.split("->")[0].split(",")

    @property
    def output(self) -> str:
        return self.positions.split("->")[1]


def _braces(name: str, spec: str, positions: str, names: str) -> Form:
    return Form(
        f"{name}  {spec}",
        positions,
        names,
        lambda *operands, **kw: jnp.einsum(spec, *operands, **kw),
    )


FORMS = [
    _braces("matmul", "{i,k},{k,j}->{i,j}", "ik,kj->ij", "ikj"),
    _braces("batched", "i{b,k},j{b,k}->ij{b}", "bik,bkj->bij", "bk"),
    _braces("implicit", "i{b,k},{k,j}", "bik,kj->bij", "bkj"),
    _braces("scores", "q{b,h,d},k{b,h,d}->qk{b,h}", "bqhd,bkhd->bhqk", "bhd"),
    _braces("values", "q{b,h,k},d{b,h,k}->qd{b,h}", "bhqk,bkhd->bhqd", "bhk"),
    _braces("outer", "{i},{j}->{i,j}", "i,j->ij", "ij"),
    _braces("one operand alone", "{b,k},{k}->{}", "bk,k->", "bk"),
    _braces("bilinear", "{b,i},{i,j},{b,j}->{b}", "bi,ij,bj->b", "bij"),
    _braces("chain", "{i,j},{j,k},{k,l}->{i,l}", "ij,jk,kl->il", "ijkl"),
    Form(
        "xeinsum",
        "ik,kj->ij",
        "ikj",
        lambda x, y: xeinsum("{i,k},{k,j}->{i,j}", x, y),
        accumulates=False,
    ),
    Form("pdot", "ik,kj->ij", "ikj", lambda x, y, **kw: pdot(x, y, "k", **kw)),
    Form(
        "pdot pos_batch, pos_contract",
        "bikd,bjkd->bij",
        "k",
        lambda x, y, **kw: pdot(x, y, "k", pos_contract=((2,), (2,)), pos_batch=((0,), (0,)), **kw),
    ),
]


def groups() -> Iterator[tuple[str, list[Case]]]:
    """For each form and placement its programs: product and gradients, in each kind of precision."""
    for form in FORMS:
        for resources, sizes in _placements(form):
            name = title(form.name, resources) + (" full" if sizes else "")
            yield (
                name,
                [
                    _case(
                        f"{name} {program} {dtype}",
                        form,
                        resources,
                        {**SIZES, **sizes},
                        program,
                        dtype,
                    )
                    for program in PROGRAMS
                    for dtype in ["float32", "bfloat16"][: 1 + form.accumulates]
                ],
            )


def cases() -> Iterator[Case]:
    for _, group in groups():
        yield from group


def _placements(form: Form) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Assignments (of none, contracted, kept and mixed axes), and sizes where they differ.

    The last one is full: one element of each axis on a device.
    """
    kept = [c for c in form.output if c in form.names]
    summed = list(
        dict.fromkeys(c for c in form.positions if c in form.names and c not in form.output)
    )
    candidates = [
        {},
        dict(zip(summed[:1], ["x"])),
        dict(zip(summed[:1], [("x", "y")])),
        dict(zip(summed[:2], ["x", "y"])),
        dict(zip(kept[:1], ["x"])),
        dict(zip([*kept[:1], *summed, *kept[1:]], ["x", "y"])),
    ]
    for k, resources in enumerate(candidates):
        if resources not in candidates[:k]:
            yield resources, {}
    yield resources, {c: dict(zip(MESH_AXES, MESH_SHAPE))[axis] for c, axis in resources.items()}


def _product(contract, *operands):
    return contract(*operands[:-1])


def _gradients(contract, *operands):
    return jax.vjp(contract, *operands[:-1])[1](operands[-1])


PROGRAMS = {"product": _product, "gradients": _gradients}


def _case(name, form: Form, resources: Mapping[str, Any], sizes, program, dtype):
    options = {} if dtype == "float32" else {"preferred_element_type": jnp.float32}
    specs = tuple(P(*map(resources.get, letters)) for letters in form.inputs) if resources else None
    output_spec = P(*map(resources.get, form.output))
    contracted = [axis for c, axis in resources.items() if c not in form.output]
    axes = [axis for group in contracted for axis in ([group] if isinstance(group, str) else group)]

    def by_hand(*operands):
        part = jnp.einsum(form.positions, *operands, **options)
        return lax.psum(part, tuple(axes)) if axes else part

    def named_dims(letters):
        return {k: c for k, c in enumerate(letters) if c in form.names}

    in_axes = tuple(map(named_dims, form.inputs))
    named = functools.partial(form.call, **options)

    def args(k):
        shapes = [
            tuple(sizes.get(c, SIZE) for c in letters) for letters in [*form.inputs, form.output]
        ]
        *operands, cotangent = arrays(*shapes)
        return (*(np.asarray(x, dtype) for x in operands), cotangent)

    run = PROGRAMS[program]
    return Case(
        name,
        lambda: jax.jit(
            functools.partial(
                run, xmap(named, in_axes, named_dims(form.output), axis_resources=dict(resources))
            )
        ),
        lambda: jax.jit(functools.partial(run, sharded(by_hand, specs, output_spec))),
        args,
        (*specs, output_spec) if specs else None,
    )
