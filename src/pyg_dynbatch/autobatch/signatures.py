"""Everything that calls with one signature have in common, and how they are run on many rows.

A *key* is what a session builds from a call: the target, and tokens for its arguments. A row is the
number of its type in the table; a number is ``(int, 2)``; kwargs are a name and a token. A
:class:`Spec` has the same key with types written out, so that it can be pickled, and the arguments
as a template. For ``torch.cat([h, self.start])`` of a row ``h`` of type number 1, ``float32[4]``::

    key            (torch.cat, (list, 2), 1, Shared("start"))
    spec.key       (torch.cat, (list, 2), float32[4], Shared("start"))
    spec.template  (([ROW, Shared("start")],), {})

A :class:`SignatureSite` is a spec in a table, with the number that records use and the types of its
results; rows from outside have a site without a spec. Its ``Signature`` is what the engine calls.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import isclass
from operator import is_
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyg_dynbatch.autobatch.cache import Cache
from pyg_dynbatch.autobatch.families import Family
from pyg_dynbatch.autobatch.forms import Examined, examine_function, examine_module, on_ones
from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, NeedsPython
from pyg_dynbatch.autobatch.lengths import Lengths
from pyg_dynbatch.autobatch.recorder import Lookup, Snapshot
from pyg_dynbatch.autobatch.state import Conditions, State, WatchedModule
from pyg_dynbatch.autobatch.table.calls import Template, mapped
from pyg_dynbatch.autobatch.table.functions import ROW, Batched, batched, named
from pyg_dynbatch.autobatch.table.layers import batched_layer
from pyg_dynbatch.autobatch.twins import Twins
from pyg_dynbatch.core import recording
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.operation import Operations, Ragged, Signature, TorchFunction, row_type_of
from pyg_dynbatch.core.recording import CALL, INPUT, Sites
from pyg_dynbatch.core.types import TensorType, parts_of


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer among the arguments of a call, or a view of one."""

    name: str
    view: tuple[Any, ...] = ()  # shape, strides and offset


InputType = TensorType | Ragged
"""The type of an argument of a call."""

NO_TEMPLATE: Template = ((), {})
"""That of a loop, or of another target whose arguments are all rows."""


class Spec:
    """A signature; it can be pickled without the model and means the same in every process.

    Args:
        key: Target, static arguments and row types; equal keys are batched together.
        target: Path of a module in the model, or a function.
        template: Its arguments, with parameters as :class:`Shared`.
        inputs: Type of each row.
        no_grad: Whether the call was recorded under ``torch.no_grad``.
    """

    def __init__(
        self,
        key: tuple[object, ...],
        target: "str | Callable[..., Any] | Own",
        template: Template,
        inputs: tuple[InputType, ...],
        no_grad: bool,
    ) -> None:
        self.key = key
        self.target = target
        self.template = template
        self.inputs = inputs
        self.no_grad = no_grad
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.key == other.key

    def __reduce__(self) -> tuple[object, ...]:  # hashes of strings differ between processes
        return Spec, (self.key, self.target, self.template, self.inputs, self.no_grad)

    @property
    def inside(self) -> tuple["Spec", ...]:
        """Signatures of the calls that a call makes."""
        return self.target.specs if isinstance(self.target, Own) else ()

    @property
    def rows(self) -> list[TensorType]:
        """The type of each argument that is one row."""
        return [input_type for input_type in self.inputs if isinstance(input_type, TensorType)]

    def walk(self) -> Iterator["Spec"]:
        """List the signature itself, and all inside."""
        yield self
        for each in self.inside:
            yield from each.walk()


class Own:
    """A target with a form of its own, which is not examined, such as a loop."""

    specs: tuple[Spec, ...] = ()
    """Signatures of the calls that it makes."""

    def examined(self, table: "SignatureTable", spec: Spec) -> Examined:
        """Return the form of a signature of this target."""
        raise NotImplementedError

    def joined(self, calls: int) -> "Own | None":
        """Return the target that makes several calls at once, if there is one, as of stacks."""


Build = Callable[[Sequence[Lazy]], Any]
"""Makes the result of a call from its values."""


@dataclass(eq=False)
class SignatureSite:
    """One signature in a table: its number, and what its calls return. It stays as it is."""

    number: int
    kinds: tuple[int, ...]  # row type of each result, as a number of the table
    spec: Spec | None = None  # None for rows from outside
    signature: Signature | None = None
    where: str = ""
    examined: Examined | None = None
    build: "Build | None" = None  # the result, unless it is one row
    gradient: bool | None = False  # whether gradients flow back from it; None: as its arguments
    is_view: bool = False  # whether its results may share memory with its arguments
    called: Sequence[WatchedModule] = ()  # the module that is called, and all inside
    family: Family | None = None  # what makes its calls, of a site of rows of any lengths

    @property
    def num_reads(self) -> int:
        """How many values a call reads."""
        return 0 if self.spec is None else len(self.spec.inputs)

    @property
    def parts(self) -> tuple[Snapshot, ...]:
        """What notices that a module has changed."""
        return tuple(watched.snapshot for watched in self.called)


NOTE = "  in autobatch: "
"""Begins the note that says where an error of the user's own code was raised."""

# Their numbers are those of native/recorder.h.
OPEN = SignatureSite(-1, ())
"""The site of modules whose inside is recorded."""
VARIES = SignatureSite(-3, ())
"""The site of calls whose numbers differ from call to call: values take their place."""


class SignatureTable:
    """All signatures that a model has met so far, in one mode (thread, training, dtypes, ...).

    start(tensors) for each session → outside_like(), site_of() for what is new →
    recorded, lengths when calls are scheduled → form_of() when they are run
    """

    def __init__(self, model: nn.Module) -> None:
        # The model.
        self.modules = dict(model.named_modules())
        self.path = {id(module): path for path, module in self.modules.items()}
        self.tensors: dict[str, Tensor] = {}  # parameters and buffers of the current call
        self.device = torch.device("cpu")  # of these
        self.state = State(self.modules)
        self.opened: dict[nn.Module, tuple[str, str]] = {}  # where first, and why

        # Row types, and the sites of rows from outside by their types.
        self.row_types: list[TensorType] = []
        self.samples: list[Tensor] = []  # of each row type, without content
        self.outside: dict[TensorType, SignatureSite] = {}
        self.like: dict[tuple[torch.Size, torch.dtype], SignatureSite] = {}  # the same, for C

        # All sites, and those of calls by what is known of them.
        self.sites: list[SignatureSite] = []
        self.by_key: dict[tuple[object, ...], SignatureSite] = {}
        self.by_spec: dict[Spec, SignatureSite] = {}
        self.lookup = Lookup()  # by_key in C
        self.shared: dict[Shared, int] = {}  # numbers, which stand for them in C
        self.numbers = NumberArguments(self.samples)
        self.lengths = Lengths(self)
        self._recorded = Sites()

        # What the calls run, and what examples have recorded.
        self.engine = Engine(Operations()).float()  # whose rows have the dtypes of their types
        self.names = Counter[str]()  # how many more operations have a name than one
        self.cache = Cache()

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the parameters and buffers of a session, and the model as it is."""
        self.tensors.clear()
        self.tensors.update(tensors)
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.state.start()
        self.lengths.start()

    @cached_property
    def conditions(self) -> Conditions:
        """What scheduled batches take for granted of the model."""
        return Conditions.of(self.modules, self.tensors)

    def number_of(self, shared: Shared) -> int:
        """Return the number of a parameter or buffer among the arguments of calls."""
        return self.shared.setdefault(shared, len(self.shared))

    def outside_of(self, row_type: TensorType) -> SignatureSite:
        """Return the site of rows of a type that the model did not compute."""
        if row_type not in self.outside:
            site = self.outside[row_type] = SignatureSite(len(self.sites), (len(self.row_types),))
            self.row_types.append(row_type)
            sample = torch.empty(row_type.shape, dtype=row_type.dtype, device="meta")
            self.samples.append(sample)
            self.sites.append(site)
        return self.outside[row_type]

    def outside_like(self, tensor: Tensor) -> SignatureSite:
        """Return the site of rows like a tensor."""
        key = tensor.shape, tensor.dtype
        if key not in self.like:
            row_type = TensorType(tuple(tensor.shape), tensor.dtype)
            self.lengths.see(row_type)
            self.like[key] = self.outside_of(row_type)
        return self.like[key]

    def site_of(self, spec: Spec, device: torch.device, where: str) -> SignatureSite:
        """Return the site of a signature; examine it first if it is new."""
        if spec not in self.by_spec:
            for each in spec.inside:
                self.site_of(each, device, where)
            self.by_spec[spec] = self._add(spec, device, where)
        return self.by_spec[spec]

    def _add(self, spec: Spec, device: torch.device, where: str) -> SignatureSite:
        module = self.module_of(spec)
        name = name_of(spec.target if module is None else module)
        if isinstance(spec.target, str):
            name = spec.target or name
        recording = ACTIVE.session
        ACTIVE.session = None
        ACTIVE.examining = where or name
        try:
            if module is not None and any(map(is_lazy, module.parameters())):
                call = _Call(spec, module, self.tensors)  # which gives them their shapes
                with torch.no_grad():
                    on_ones(call, spec.rows, device)
            with self.state.untouched(name, where):
                examined = self.lengths.known(spec, partial(_Call, spec, module, self.tensors))
                if examined is None:
                    examined = self._examine(spec, module, device, name, where)
                    self.lengths.meet(spec, examined)
        except NeedsPython as error:
            if module is None:
                problem = f"autobatch: {name} reads a value of its argument"
                hint = "item() or tolist() of the argument, which suspend the example"
                expected = "a function whose result has one shape and dtype"
                raise mismatch(TypeError, problem, expected, where=where, hint=hint) from None
            self.opened[module] = (where, str(error) or "it reads a value")
            return OPEN
        except (RecursionError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if isinstance(error.args[0] if error.args else "", Mismatch):
                raise
            types = ", ".join(str(row_type_of(input_type)) for input_type in spec.inputs)
            problem = f"autobatch: {name} fails on rows of these types: {types}"
            hint = "" if module is None else "autobatch.open(module) records what is inside"
            raise failed(error, problem, where, hint) from error
        finally:
            ACTIVE.session = recording
            ACTIVE.examining = ""
        site = self._build_site(spec, module, examined, name, where)
        self.sites.append(site)
        self.lengths.made(site)
        return site

    def _build_site(
        self, spec: Spec, module: nn.Module | None, examined: Examined, name: str, where: str
    ) -> SignatureSite:
        outputs = [leaf for leaf in examined.leaves if isinstance(leaf, TensorType)]
        form, build = _flat(examined)
        signature = self._add_operation(form, spec.inputs, outputs, name)
        kinds = tuple(self.outside_of(row_type).kinds[0] for row_type in outputs)
        called = list[WatchedModule]()
        if isinstance(spec.target, str):
            called = self.state.inside(spec.target)
        for watched in called:
            watched.judge()
        return SignatureSite(
            number=len(self.sites),
            kinds=kinds,
            spec=spec,
            signature=signature,
            where=where,
            examined=examined,
            build=build,
            gradient=self._gradient(spec, module),
            is_view=examined.is_view,
            called=called,
        )

    def _add_operation(
        self,
        form: Callable[..., Any],
        inputs: Sequence[InputType],
        outputs: Sequence[TensorType],
        name: str,
    ) -> Signature:
        """Add an operation to the engine; a number makes its name unique: ``cat``, ``cat 2``."""
        operations = self.engine.operations
        stem = name.replace(".", "/")
        unique_name = stem
        while unique_name in operations:
            self.names[stem] += 1
            unique_name = f"{stem} {self.names[stem] + 1}"
        return operations.add(form, inputs, outputs, name=unique_name, random=False)

    def add_family(self, member: SignatureSite, family: Family) -> SignatureSite:
        """Add the site of the signatures that differ from one in lengths alone."""
        stem = member.signature.name.split(" ")[0]  # type: ignore[union-attr]
        inputs = [self._general(input_type) for input_type in member.spec.inputs]  # type: ignore[union-attr]
        kinds = tuple(map(self.lengths.buffer_of, member.kinds))
        outputs = [self.row_types[kind] for kind in kinds]
        site = replace(
            member,
            number=len(self.sites),
            kinds=kinds,
            signature=self._add_operation(family, inputs, outputs, f"{stem} of any length"),
            examined=member.examined._replace(way=family.recipe.name),  # type: ignore[union-attr]
            family=family,
        )
        self.sites.append(site)
        return site

    def _general(self, input_type: InputType) -> InputType:
        """Return the type of an argument without its length."""
        if isinstance(input_type, Ragged):
            (row_type,) = parts_of(input_type.row_type)
            return Ragged(self._general_row(row_type))
        return self._general_row(input_type)

    def _general_row(self, row_type: TensorType) -> TensorType:
        kind = self.outside_of(row_type).kinds[0]
        return self.row_types[self.lengths.buffer_of(kind)]

    def module_of(self, spec: Spec) -> nn.Module | None:
        """Return the module that a signature calls, if it is one."""
        return self.modules[spec.target] if isinstance(spec.target, str) else None

    def examine(self, spec: Spec) -> Examined:
        """Choose the form of a signature without adding it."""
        module = self.module_of(spec)
        recording = ACTIVE.session
        ACTIVE.session = None
        try:
            name = name_of(spec.target if module is None else module)
            return self._examine(spec, module, self.device, name, "")
        finally:
            ACTIVE.session = recording

    def form_of(self, site: SignatureSite) -> Callable[..., Any]:
        """Return what makes the calls of a site on stacked rows."""
        return self.engine.operations[site.signature.name].module  # type: ignore[union-attr]

    def _gradient(self, spec: Spec, module: nn.Module | None) -> bool | None:
        """Return whether gradients flow back from the results; ``None``: as its arguments."""
        if spec.no_grad or spec.target in _DETACHING:
            return False
        tensors = [self.tensors[token.name] for token in spec.key if isinstance(token, Shared)]
        if module is not None:
            tensors += module.parameters()
        is_trained = any(tensor.requires_grad for tensor in tensors)
        is_trained |= any(self.by_spec[inner].gradient for inner in spec.inside)
        return True if is_trained else None

    def _examine(
        self, spec: Spec, module: nn.Module | None, device: torch.device, name: str, where: str
    ) -> Examined:
        if isinstance(spec.target, Own):
            return spec.target.examined(self, spec)
        if callable(spec.target) and any(isinstance(each, Ragged) for each in spec.inputs):
            form = torch.no_grad()(spec.target) if spec.no_grad else spec.target
            return Examined(form, "ragged", [row_type_of(spec.inputs[-1])], tree_flatten(0)[1])

        call = _Call(spec, module, self.tensors)
        if module is None:
            return examine_function(call, spec.rows, device, name, where)
        return examine_module(call, module, spec.rows, device, name, where)

    @property
    def recorded(self) -> Sites:
        """The table of sites of recordings."""
        for site in self.sites[len(self._recorded) :]:
            results = tuple(self.row_types[kind] for kind in site.kinds)
            kind_of_site = CALL if site.signature else INPUT
            self._recorded.append(recording.Site(kind_of_site, results, site.signature))
        return self._recorded


_DETACHING = {torch.detach, Tensor.detach}

MOST_NUMBERS = 4
"""How many Python numbers a function may be given in one place before they become data."""
NUMERIC = frozenset(
    named(
        "add sub mul div true_divide pow maximum minimum where lerp lt le gt ge eq ne remainder "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ "
        "__rpow__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __mod__"
    )
)
"""Functions for which a number is the same as a tensor without dimensions."""


class NumberArguments:
    """Python numbers among the arguments of calls: parts of a signature until they vary.

    Args:
        samples: A tensor of each row type.
    """

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples = samples
        # The numbers of calls, by the keys of the calls without these.
        self._met = defaultdict[tuple[object, ...], set[tuple[object, ...]]](set)
        self._dtypes: dict[tuple[object, ...], torch.dtype] = {}

    def vary(self, key: tuple[object, ...]) -> bool:
        """Note the numbers in the key of a call; return whether they now vary, and so are data."""
        target = key[0]
        if not isinstance(target, nn.Module) and target not in NUMERIC:
            return False
        # Torch computes in more digits with a number than with a tensor of half precision.
        dtypes = {self._samples[token].dtype for token in key if type(token) is int}
        if not dtypes.isdisjoint((torch.float16, torch.bfloat16)):
            return False
        is_last_named = len(key) > 1 and isinstance(key[-2], str)
        if is_last_named:  # a function may take a number by name, and no tensor
            return False
        numbers = tuple(token for token in key if _is_number(token))
        if not numbers:
            return False

        key_without_numbers = tuple(token[0] if _is_number(token) else token for token in key)
        numbers_met = self._met[key_without_numbers]
        numbers_met.add(numbers)
        return len(numbers_met) > MOST_NUMBERS

    def dtype_of(self, cls: type[float], kinds: Sequence[int]) -> torch.dtype:
        """Return the dtype of a tensor that takes the place of a number beside values."""
        key = (cls, *kinds)
        if key not in self._dtypes:
            samples = [self._samples[each] for each in kinds]
            # A condition, as that of torch.where, has no part in it.
            samples = [each for each in samples if each.dtype != torch.bool] or samples
            dtype = torch.result_type(samples[0], cls(1))
            for sample in samples[1:]:
                dtype = torch.promote_types(dtype, sample.dtype)
            self._dtypes[key] = dtype
        return self._dtypes[key]


def _is_number(token: object) -> TypeGuard[tuple[type, object]]:
    return type(token) is tuple and len(token) == 2 and token[0] in (int, float)


def failed(error: Exception, problem: str, where: str, hint: str) -> Exception:
    """Create the error for a call that fails because autobatch makes it in a different way."""
    classes = TypeError, ValueError, IndexError, AttributeError
    cls = next((k for k in classes if type(error) is k), RuntimeError)
    got = f"{type(error).__name__}: {error}".strip()
    return mismatch(cls, problem, got=got, where=where, hint=hint)


def name_of(target: object) -> str:
    """Name a module or function for people."""
    if isinstance(target, nn.Module):
        return type(target).__name__
    return str(getattr(target, "__name__", type(target).__name__)).strip("_")


_BUILT_IN = BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType


class _Call(TorchFunction):
    """Call a target with rows and parameters in the places of its template."""

    target: Callable[..., Any]

    def __init__(self, spec: Spec, module: nn.Module | None, tensors: dict[str, Tensor]) -> None:
        self.spec = spec
        self.module = module
        self.tensors = tensors
        self.target = spec.target if module is None else module  # type: ignore[assignment]
        args, kwargs = spec.template
        self.is_plain = not (kwargs or spec.no_grad) and all(each is ROW for each in args)
        shared = [token for token in spec.key if isinstance(token, Shared)]
        self.names = [each.name for each in shared]
        self.has_views = any(each.view for each in shared)
        # The parameters that the known form uses, and that form.
        self._kept: tuple[Sequence[Tensor], Callable[..., Any]] | None = None

    def __call__(self, *rows: Tensor) -> Any:
        """Call the target itself."""
        return self.target(*rows) if self.is_plain else self._filled(rows, self.target, _itself)

    def twin(self, twins: Twins) -> Callable[..., Any]:
        """Return the same call on twins of the module and of parameters."""
        target = self.target if self.module is None else twins.module(self.module)
        return lambda *rows: self._filled(rows, target, twins.tensor)

    def batched(self) -> Batched | None:
        """Return the form that the tables have for it, with the parameters as they are now."""
        args, kwargs = self._resolved(self.spec.template)
        types = self.spec.rows
        if self.module is not None:
            return batched_layer(self.module, args, kwargs, types)
        return batched(self.target, args, kwargs, types)

    def known_form(self, *rows: Tensor) -> Any:
        """Run the form of the tables."""
        if self.spec.no_grad:
            with torch.no_grad():
                return self._form()(*rows)
        return self._form()(*rows)

    def _form(self) -> Callable[..., Any]:
        """Return the form, which is made again if a parameter has been replaced."""
        shared = [self.tensors[name] for name in self.names]
        if self._kept is None or not all(map(is_, shared, self._kept[0])):
            self._kept = shared, self.batched().form  # type: ignore[union-attr]
        _, form = self._kept
        if self.has_views:  # they belong to a graph
            self._kept = None
        return form

    def of_run(self, called: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the function of torch, or its batched form, with the parameters of this run."""
        if self.module is not None or self.spec.no_grad or self.has_views:
            return None
        if called == self.known_form:
            return self._form()
        return self.target if self.is_plain and isinstance(self.target, _BUILT_IN) else None

    def _resolved(self, value: object) -> Any:
        if isinstance(value, Shared):
            tensor = self.tensors[value.name]
            return tensor.as_strided(*value.view) if value.view else tensor
        return mapped(self._resolved, value)

    def _filled(
        self,
        rows: Sequence[Tensor],
        target: Callable[..., Any],
        convert: Callable[[Tensor], Tensor],
    ) -> Any:
        args, kwargs = self._fill(self.spec.template, iter(rows), convert)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.spec.no_grad):
            return target(*args, **kwargs)

    def _fill(
        self, value: object, rows: Iterator[Tensor], convert: Callable[[Tensor], Tensor]
    ) -> Any:
        if isinstance(value, Shared):
            return convert(self._resolved(value))
        if value is ROW:
            return next(rows)
        return mapped(lambda item: self._fill(item, rows, convert), value)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


_RETURN_TYPES = frozenset(
    kind for kind in vars(torch.return_types).values() if isclass(kind) and issubclass(kind, tuple)
)
"""Named tuples that functions of torch return."""


def _flat(examined: Examined) -> tuple[Callable[..., Any], Build | None]:
    """Return the form with flat results, and what builds the result of a call from its rows."""
    form = examined.form
    leaves = examined.leaves
    structure = examined.structure
    if structure.is_leaf():
        return form, None
    if all(isinstance(leaf, TensorType) for leaf in leaves):
        if len(leaves) > 1 and structure == tree_flatten(tuple(leaves))[1]:
            return form, tuple
        if structure.type in _RETURN_TYPES:
            return form, structure.type

    def flat(*rows: Tensor) -> Tensor | tuple[Tensor, ...]:
        tensors = tuple(leaf for leaf in tree_leaves(form(*rows)) if isinstance(leaf, Tensor))
        return tensors if len(tensors) > 1 else tensors[0]

    def build(values: Sequence[Lazy]) -> Any:
        rest = iter(values)
        filled = [next(rest) if isinstance(leaf, TensorType) else leaf for leaf in leaves]
        return tree_unflatten(filled, structure)

    return flat, build
