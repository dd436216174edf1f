"""Notice axes whose length differs from example to example, and let all lengths share a step.

Each length is recorded as a shape of its own, ``int64[7]`` and ``int64[9]``, so that values have
the shapes that the model asks for. Once an axis of the tensors of examples has had more than
``MOST_LENGTHS`` lengths, what is scheduled are calls of *families*: the signatures that differ in
lengths alone. ``Embedding(int64[7])`` and ``Embedding(int64[9])`` are one family, whose rows are
:class:`~pyg_dynbatch.autobatch.sequences.Sequences`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from pyg_dynbatch.autobatch.families import BY_LENGTH, Family, Recipe, VaryingType, recipe_of
from pyg_dynbatch.autobatch.forms import Examined
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.types import TensorType, has_gradient

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.signatures import SignatureSite, SignatureTable, Spec

MOST_LENGTHS = 4
"""How many lengths an axis of the tensors of examples may have before all share a step."""


class Lengths:
    """The varying types of a table, and the families of its signatures.

    see(row type of an outside row) → start() of a session → known(), meet() for new signatures →
    targets() when what was recorded is scheduled

    Within a session, a row type that was met as one of a fixed shape remains so.
    """

    def __init__(self, table: "SignatureTable") -> None:
        self.table = table
        self.types: dict[VaryingType, int] = {}  # the row type of its buffer
        self.buffers: dict[int, VaryingType] = {}  # the reverse
        self._sizes = defaultdict[VaryingType, set[int]](set)
        # Row types of vectors of examples, and those that calls on rows of fixed shapes return.
        self._vectors = set[int]()
        self._fixed = set[int]()
        self._type_of_kind: list[VaryingType | None] = []
        self._has_new_types = False
        self._recipes: dict[Any, Recipe] = {}  # by keys without lengths
        self._leaves: dict[Any, Sequence[Any]] = {}  # the results of one length, by these keys
        # By these keys, and the types of results.
        self._families: dict[Any, tuple[Family, SignatureSite]] = {}
        self._targets: list[int] = []  # of each site the number of what is scheduled

    def start(self) -> None:
        """Begin a session, for which all row types are seen anew."""
        if self._has_new_types:
            self._has_new_types = False
            self._targets.clear()
            self._fixed = self._vectors.copy()
            self._type_of_kind.clear()
            while any([self._fix_results(site) for site in self.table.sites]):
                pass

    def see(self, row_type: TensorType) -> None:
        """Note the shape of a tensor of an example."""
        if len(row_type.shape) < 2 and has_gradient(row_type.dtype):
            # Their widths differ from layer to layer.
            kind = self.table.outside_of(row_type).kinds[0]
            self._vectors.add(kind)
            self._has_new_types |= self._fix([kind])
            return
        for varying_type in VaryingType.all_of(row_type):
            sizes = self._sizes[varying_type]
            sizes.update(varying_type.sizes_of(row_type))
            if len(sizes) > MOST_LENGTHS:
                self._declare(varying_type)

    def _fix(self, kinds: Sequence[int]) -> bool:
        """Let row types be of fixed shapes; return whether they have not been so far."""
        self._fixed.update(kinds)
        seen = self._type_of_kind
        return any(seen[kind] is not None for kind in kinds if kind < len(seen))

    def _fix_results(self, site: "SignatureSite") -> bool:
        if site.spec is None or site.family or any(map(self._type_of_input, site.spec.inputs)):
            return False
        if not self._fix(site.kinds):
            return False
        for kind in site.kinds:
            self._type_of_kind[kind] = None
        return True

    def _declare(self, varying_type: VaryingType) -> None:
        if varying_type not in self.types:
            self._look_at_kinds()
            kind = self.table.outside_of(varying_type.buffer).kinds[0]
            self.types[varying_type] = kind
            self.buffers[kind] = varying_type
            self._has_new_types = True

    def type_of(self, kind: int) -> VaryingType | None:
        """Return the varying type of a row type, ``None`` for one of a fixed shape."""
        self._look_at_kinds()
        return self._type_of_kind[kind]

    def _look_at_kinds(self) -> None:
        for kind in range(len(self._type_of_kind), len(self.table.row_types)):
            row_type = self.table.row_types[kind]
            known = (each for each in self.types if each.fits(row_type))
            is_fixed = kind in self._fixed or row_type.tag
            self._type_of_kind.append(None if is_fixed else next(known, None))

    def _type_of_input(self, wanted: Any) -> VaryingType | None:
        if isinstance(wanted, Ragged) or not self.types:
            return None
        return self.type_of(self.table.outside_of(wanted).kinds[0])

    # New signatures.

    def known(self, spec: "Spec", make_call: Callable[[], Any]) -> Examined | None:
        """Return how a signature is run, if one that differs in length alone was examined."""
        types = [self._type_of_input(wanted) for wanted in spec.inputs]
        if not any(types):
            return None
        recipe = self._recipes.get(self._key_of(spec))
        if recipe is None or recipe.known is None:
            return None
        lengths = {
            size
            for kind, row_type in zip(types, spec.inputs, strict=True)
            if kind is not None
            for size in kind.sizes_of(row_type)
        }
        if len(lengths) > 1 or (length := recipe.length_of(lengths.pop())) <= 0:
            return None
        results = iter(recipe.results)
        leaves = [
            _of_length(leaf, next(results), length) if isinstance(leaf, TensorType) else leaf
            for leaf in recipe.known.leaves
        ]
        call = make_call()
        form = call if recipe.known.way == "direct" else call.known_form
        return recipe.known._replace(form=form, leaves=leaves)

    def meet(self, spec: "Spec", examined: Examined) -> None:
        """Choose how the family of a signature is run, and declare the types of its results."""
        types = [self._type_of_input(wanted) for wanted in spec.inputs]
        if not any(types):
            return
        key = self._key_of(spec)
        if key not in self._recipes:
            module = self._module_of(spec)
            self._recipes[key] = recipe_of(spec, module, types, examined, self.table.examine)
            self._leaves[key] = examined.leaves
            for varying_type in filter(None, self._recipes[key].results):
                self._declare(varying_type)
        for before, leaf in zip(self._leaves[key], examined.leaves, strict=False):
            if _differ_in_lengths(before, leaf):
                self._declare(VaryingType.between(before, leaf))

    def made(self, site: "SignatureSite") -> None:
        """Note the row types of the results of a new signature."""
        if site.spec is not None and not any(map(self._type_of_input, site.spec.inputs)):
            self._has_new_types |= self._fix(site.kinds)

    def _module_of(self, spec: "Spec") -> nn.Module | None:
        return self.table.modules[spec.target] if isinstance(spec.target, str) else None

    def _key_of(self, spec: "Spec") -> tuple[Any, ...]:
        """Return the key of a signature without lengths."""
        return tuple(
            (self._type_of_input(part) or part) if isinstance(part, TensorType) else part
            for part in spec.key
        )

    # Scheduling.

    def targets(self) -> np.ndarray:
        """Return for each site the number of the site that is scheduled in its place."""
        while len(self._targets) < len(self.table.sites):  # to which families are added
            site = self.table.sites[len(self._targets)]
            self._targets.append(site.number if site.family else self._target_of(site))
        return np.array(self._targets)

    def _target_of(self, site: "SignatureSite") -> int:
        results = [self.type_of(kind) for kind in site.kinds]
        if site.spec is None:  # rows from outside
            known = results[0]
            return site.number if known is None else self.table.outside[known.buffer].number
        if not self._has_any_length(site, results):
            return site.number
        spec = site.spec
        examined = site.examined
        self.meet(spec, examined)  # type: ignore[arg-type]
        key = self._key_of(spec)
        exact: Any = (
            key,
            tuple(known or kind for kind, known in zip(site.kinds, results, strict=True)),
        )
        if any(isinstance(wanted, Ragged) for wanted in spec.inputs):
            exact = site.number
        types = [self._type_of_input(wanted) for wanted in spec.inputs]
        if exact not in self._families:
            family = Family(self._recipes.get(key, BY_LENGTH), types, results)
            self._families[exact] = family, self.table.add_family(site, family)
        family, target = self._families[exact]
        shapes = tuple(
            None if known is None else wanted.shape
            for known, wanted in zip(types, spec.inputs, strict=True)
        )
        family.members[shapes] = self.table.form_of(site)
        return target.number

    def _has_any_length(self, site: "SignatureSite", results: Sequence[Any]) -> bool:
        """Return whether an argument or result has any length."""
        inputs = [row_type_of(wanted) for wanted in site.spec.inputs]  # type: ignore[union-attr]
        return any(results) or any(map(self._type_of_input, inputs))

    def buffer_of(self, kind: int) -> int:
        """Return the row type of the buffer in which rows of a row type are kept."""
        known = self.type_of(kind)
        return kind if known is None else self.types[known]


def _of_length(leaf: TensorType, kind: VaryingType | None, length: int) -> TensorType:
    return leaf if kind is None else kind.row_type(length)


def _differ_in_lengths(one: Any, other: Any) -> bool:
    if not isinstance(one, TensorType) or not isinstance(other, TensorType):
        return False
    return one != other and one.dtype == other.dtype and len(one.shape) == len(other.shape)
