"""Splits arguments and results into their arrays, and all else.

Flax objects are split together, since they may share variables.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from demo_optax.step import modules

Shape = tuple[int, ...]


class Known:
  """Marks a number that is for an NNX object, or an array that one holds."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
  """A leaf that is not an array: a program is for its value."""

  value: Any  # a number, if it is `Known`
  type: type  # since `1 == 1.0`


def is_constant(x: object) -> bool:
  """Returns whether `x` is a `Constant`."""
  return isinstance(x, Constant)


def only_arrays(
  tree: object,
  known: list[object],
) -> Any:
  """Returns a tree whose leaves are its arrays; all else is in `Constant`s.

  What is `known` has its number there. NNX objects become known.
  """
  numbers = {id(x): number for number, x in enumerate(known)}

  def wrap(
    x: object,
    in_equinox: bool = False,
  ) -> object:
    if modules.is_equinox(x):
      return jax.tree.map(lambda x: wrap(x, True), x, is_leaf=modules.is_object)
    if id(x) not in numbers:
      if modules.is_array(x, in_equinox):
        return x
      if not modules.is_object(x):
        return Constant(x, type(x))
      numbers[id(x)] = len(known)
      known.append(x)
    return Constant(numbers[id(x)], Known)

  return jax.tree.map(
    wrap, tree, is_leaf=lambda x: modules.is_object(x) or modules.is_equinox(x)
  )


class Form(NamedTuple):
  """The structure that a step's arguments or results have, without arrays.

  Its arrays are those in the tree, then those in its NNX objects.
  """

  treedef: jax.tree_util.PyTreeDef  # of `only_arrays`
  objects: object  # the structure of the NNX objects: see `modules.split`

  def merge(
    self, arrays: Sequence[jax.Array], inner: bool
  ) -> tuple[Any, list[object]]:
    """Returns the tree with these arrays, and its NNX objects."""
    num_arrays = self.treedef.num_leaves
    # As `only_arrays` has numbered them: objects, then what they hold.
    variables = arrays[num_arrays:]
    objects = modules.merge(self.objects, variables, inner)
    known = [*objects, *variables]

    def plain(x: object) -> object:
      if not isinstance(x, Constant):
        return x
      return known[x.value] if x.type is Known else x.value

    arrays_alone = self.treedef.unflatten(arrays[:num_arrays])
    return jax.tree.map(plain, arrays_alone, is_leaf=is_constant), objects


# What an argument and its next value among the results have in common: the
# structure, and the shapes that arrays have in the step.
StateForm = tuple[jax.tree_util.PyTreeDef, tuple[Shape, ...]]


def form_of(tree: object) -> StateForm:
  """Returns a tree's form, as the step has it."""
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, tuple(map(np.shape, leaves))
