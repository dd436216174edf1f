"""Notice axes whose length differs from example to example, and let all lengths share a step.

Each length is recorded as a shape of its own, ``int64[7]`` and ``int64[9]``, so that values have
the shapes that the model asks for. Once an axis of the tensors of examples has had more than
``MOST_LENGTHS`` lengths, what is scheduled are calls of *families*: the signatures that differ in
lengths alone. ``Embedding(int64[7])`` and ``Embedding(int64[9])`` are one family, whose rows are
:class:`~pyg_dynbatch.autobatch.sequences.Sequences`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyg_dynbatch.autobatch.families import BY_LENGTH, Family, Recipe, VaryingType, recipe_of
from pyg_dynbatch.autobatch.forms import Examined, RowCall
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.types import TensorType, has_gradient, parts_of

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.signatures import InputType, SignatureSite, SignatureTable, Spec

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
        # Varying types, with the row type of the buffer of each; and the reverse.
        self.types: dict[VaryingType, int] = {}
        self.buffers: dict[int, VaryingType] = {}

        # How row types are found to vary.
        self._lengths_seen = defaultdict[VaryingType, set[int]](set)
        self._vectors = set[int]()  # row types of vectors of examples
        self._fixed = set[int]()  # these, and those that calls on rows of fixed shapes return
        self._type_of_kind: list[VaryingType | None] = []
        self._has_new_types = False

        # The families of signatures.
        self._recipes: dict[tuple[object, ...], Recipe] = {}  # by keys without lengths
        # The results of one length, by these keys.
        self._leaves: dict[tuple[object, ...], Sequence[object]] = {}
        # By these keys, and the types of results; of calls with ragged arguments by site.
        self._families: dict[object, tuple[Family, SignatureSite]] = {}
        self._targets: list[int] = []  # of each site the number of what is scheduled

    def start(self) -> None:
        """Begin a session, for which all row types are seen anew."""
        if self._has_new_types:
            self._has_new_types = False
            self._targets.clear()
            self._fixed = self._vectors.copy()
            self._type_of_kind.clear()
            # Until nothing changes: results of fixed rows are fixed, and so are results of these.
            while any([self._fix_results(site) for site in self.table.sites]):
                pass

    def see(self, row_type: TensorType) -> None:
        """Note the shape of a tensor of an example: its axes vary if they had many lengths."""
        is_vector_of_features = len(row_type.shape) < 2 and has_gradient(row_type.dtype)
        if is_vector_of_features:
            # Widths of features differ from layer to layer; they are no lengths of sentences.
            kind = self.table.outside_of(row_type).kinds[0]
            self._vectors.add(kind)
            self._has_new_types |= self._fix([kind])
            return
        for varying_type in VaryingType.all_of(row_type):
            lengths = self._lengths_seen[varying_type]
            lengths.update(varying_type.sizes_of(row_type))
            if len(lengths) > MOST_LENGTHS:
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
        """Let all row types that fit share a buffer, from the next session on."""
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
            is_fixed = kind in self._fixed or row_type.tag
            fitting = (each for each in self.types if each.fits(row_type))
            self._type_of_kind.append(None if is_fixed else next(fitting, None))

    def _type_of_input(self, input_type: "InputType") -> VaryingType | None:
        if isinstance(input_type, Ragged) or not self.types:
            return None
        return self.type_of(self.table.outside_of(input_type).kinds[0])

    # New signatures.

    def known(self, spec: "Spec", make_call: Callable[[], RowCall]) -> Examined | None:
        """Return how a signature is run, if one that differs in length alone was examined."""
        types = [self._type_of_input(input_type) for input_type in spec.inputs]
        if not any(types):
            return None
        recipe = self._recipes.get(self._key_of(spec))
        if recipe is None or recipe.known is None:
            return None
        lengths = set[int]()
        for varying_type, input_type in zip(types, spec.inputs, strict=True):
            if varying_type is not None and isinstance(input_type, TensorType):
                lengths.update(varying_type.sizes_of(input_type))
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
        types = [self._type_of_input(input_type) for input_type in spec.inputs]
        if not any(types):  # all rows are of fixed shapes
            return

        key = self._key_of(spec)
        if key not in self._recipes:
            module = self.table.module_of(spec)
            recipe = recipe_of(spec, module, types, examined, self.table.examine)
            self._recipes[key] = recipe
            self._leaves[key] = examined.leaves
            for varying_type in filter(None, recipe.results):
                self._declare(varying_type)

        # A later member shows which lengths of the results vary with those of the arguments.
        first_leaves = self._leaves[key]
        for first_leaf, leaf in zip(first_leaves, examined.leaves, strict=False):
            if isinstance(first_leaf, TensorType) and isinstance(leaf, TensorType):
                self._see_results(first_leaf, leaf)

    def _see_results(self, one: TensorType, other: TensorType) -> None:
        """Declare the type of results that differ in lengths alone."""
        is_alike = one.dtype == other.dtype and len(one.shape) == len(other.shape)
        if is_alike and one != other:
            self._declare(VaryingType.between(one, other))

    def made(self, site: "SignatureSite") -> None:
        """Note the row types of the results of a new signature."""
        if site.spec is not None and not any(map(self._type_of_input, site.spec.inputs)):
            self._has_new_types |= self._fix(site.kinds)

    def _key_of(self, spec: "Spec") -> tuple[object, ...]:
        """Return the key of a signature without lengths."""
        return tuple(
            (self._type_of_input(token) or token) if isinstance(token, TensorType) else token
            for token in spec.key
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
        spec = site.spec
        if spec is None:  # rows from outside
            (varying_type,) = results
            if varying_type is None:
                return site.number
            return self.table.outside[varying_type.buffer].number
        if not any(results) and not self._takes_any_length(spec):
            return site.number
        self.meet(spec, site.examined)  # type: ignore[arg-type]
        family, target = self._family_of(site, spec, results)
        shapes = tuple(
            input_type.shape
            if isinstance(input_type, TensorType) and self._type_of_input(input_type)
            else None
            for input_type in spec.inputs
        )
        family.members[shapes] = self.table.form_of(site)
        return target.number

    def _takes_any_length(self, spec: "Spec") -> bool:
        """Return whether an argument, ragged or not, has any length."""
        for input_type in spec.inputs:
            if any(map(self._type_of_input, parts_of(row_type_of(input_type)))):
                return True
        return False

    def _family_of(
        self, site: "SignatureSite", spec: "Spec", results: Sequence[VaryingType | None]
    ) -> "tuple[Family, SignatureSite]":
        """Return the family of a signature, and its site; add both if they are new."""
        key = self._key_of(spec)
        types_of_results = [known or kind for kind, known in zip(site.kinds, results, strict=True)]
        exact: object = (key, *types_of_results)
        if any(isinstance(input_type, Ragged) for input_type in spec.inputs):
            exact = site.number
        if exact not in self._families:
            inputs = [self._type_of_input(input_type) for input_type in spec.inputs]
            family = Family(self._recipes.get(key, BY_LENGTH), inputs, results)
            self._families[exact] = family, self.table.add_family(site, family)
        return self._families[exact]

    def buffer_of(self, kind: int) -> int:
        """Return the row type of the buffer in which rows of a row type are kept."""
        varying_type = self.type_of(kind)
        return kind if varying_type is None else self.types[varying_type]


def _of_length(leaf: TensorType, varying_type: VaryingType | None, length: int) -> TensorType:
    return leaf if varying_type is None else varying_type.row_type(length)
