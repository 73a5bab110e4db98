"""How a ``ZeroConfig`` is shown."""

import jax.numpy as jnp
import pytest
from flax import nnx

from zerojax import ZeroConfig

SETTINGS = [
    {"name": "zero3"},
    {"name": "delta", "accumulate": 4, "accumulate_order": "breadth"},
    {"name": "zero++", "grads": (None, "int4"), "compute_dtype": jnp.float32},
    {"name": "local", "host": ("optimizer",), "precise": (("*embed*", "int8"),)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["name"])
def test_its_repr_is_the_short_call_that_makes_it(settings):
    zero = ZeroConfig.preset(**settings)
    again = eval(repr(zero), {"ZeroConfig": ZeroConfig})
    assert (again, again.base) == (zero, zero.base)
    assert repr(zero).count("=") == len(settings) - 1
    assert repr(ZeroConfig.preset(**settings, units=(nnx.Linear,))).count("units=(Linear,)") == 1


def test_a_notebook_shows_a_table_of_the_options():
    text = ZeroConfig.preset("delta", accumulate=4)._repr_html_()
    assert ">weights_delta</td>" in text
    row = text.split(">accumulate</td>")[1].split("</tr>")[0]
    assert ">4<" in row
    assert ">changed<" in row
