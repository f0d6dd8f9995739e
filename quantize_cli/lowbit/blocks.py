"""Calibration block by block: what each linear layer sees, in the model that is already quantized before it.

Two streams of activations run through the decoder, one block at a time: the full-precision one, and the one
that later blocks of the quantized model will see. In a block, layers are taken in the order in which they
run (q/k/v, then o, then gate/up, then down): the input x of a layer comes from the second stream with the
layers before it quantized, its target from the first. With H = (2/n) Σ x xᵀ the cross term that pulls the
output towards its target is

    D = (2/n) Σ (W x~ - W x) xᵀ    for an input x~ in full precision, or
    D = (2/n) Σ (z~ - z) xᵀ        where W x is added to the residual stream and z is the stream after it:

r + V x should be z~ = z + (z~ - z), which undoes the error of all blocks before (hessian.py has the sums).
Which layers add to the stream is observed, not assumed: z is the input of a later module, or the output of
the block, that equals the stream before plus the layer's output.

    with open_engine(source, plan.layers, rows, device) as engine:
        for block in engine.blocks():
            for stage in block.stages():
                for work in stage.work():
                    stage.replace(work.layer, dequantized)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations import Saved, State, Workspace
from lowbit.errors import CalibrationError, PlanError, SourceError, one_line
from lowbit.hessian import LayerStats, Moments, add_tokens, finish, start_moments
from lowbit.plan import LayerPlan
from lowbit.products import Kept, Product, Products
from lowbit.skeleton import Slot, WeightSource, build_skeleton, find_slots, held, load, stored_names, unload

Check = Callable[[str, Tensor], None]

# the widest activation of one forward stays within this; a batch that followed free memory would give other
# bytes on another day
_BATCH_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}

# Hessians of experts that are measured in one pass stay within this
_EXPERT_BYTES = 2 << 30

# tokens of the first row that show how a block is made
_PROBE_TOKENS = 64

# an expert that fewer tokens reach is left to rounding: its Hessian would say nothing
EXPERT_FLOOR = 32

NOT_REACHED = "no calibration token was seen to reach it"
OUTSIDE = "outside the decoder blocks"

# the block's own output among the places where a product meets the residual stream
_OUTPUT = ""


@dataclass(frozen=True)
class Following:
    """What of the full-precision model is followed.

    target: the output of each layer.  residual: the residual stream too, where it can be observed.
    Without target there is one stream, and stats have no cross term.
    """

    target: bool = True
    residual: bool = True


@dataclass(frozen=True)
class LayerWork:
    """One layer to solve.

    weight: [N, K] float32.  stats: None where calibration has nothing to say; reason tells why.
    Layers of a stage that read the same input share one hessian tensor.
    """

    layer: LayerPlan
    weight: Tensor
    stats: LayerStats | None
    reason: str | None = None

    def same_problem(self, other: LayerWork) -> bool:
        """The rows of both may be solved as rows of one matrix."""
        if self.stats is None or other.stats is None or self.stats.hessian is not other.stats.hessian:
            return False
        return (self.layer.method, self.layer.scheme) == (other.layer.method, other.layer.scheme)


def check_model(source: WeightSource, *, trust_remote_code: bool = False) -> None:
    """Raise PlanError for a model that cannot be built, SourceError for one that has fewer blocks or other
    shapes than its config says, before a weight of it is read."""
    skeleton = build_skeleton(
        source, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=trust_remote_code
    )
    for name in skeleton.blocks:
        if not any(target.startswith(f"{name}.") for target in skeleton.origins):
            raise SourceError(
                f"{source.name}: config.json asks for {len(skeleton.blocks)} decoder blocks, but there is no "
                f"tensor of {name}; one of the two is of another model"
            )
    for target, origin in skeleton.origins.items():
        found, wanted = source.tensors[origin.sources[0]].shape, tuple(held(skeleton.model, target).shape)
        if origin.converter is None and found != wanted:
            raise SourceError(
                f"{source.name}: {origin.sources[0]} is {list(found)}, config.json asks for {list(wanted)}; "
                "one of the two is of another model"
            )


@contextmanager
def open_engine(
    source: WeightSource,
    layers: Sequence[LayerPlan],
    rows: Tensor,
    device: torch.device | str = "cpu",
    *,
    following: Following | None = None,
    trust_remote_code: bool = False,
    check: Check | None = None,
    state: Path | None = None,
    done: frozenset[str] = frozenset(),
    memory_bytes: int | None = None,
) -> Iterator[Engine]:
    """Embed the calibration rows [R, T] (int64, no padding) and stop before the first block.

    check: called with (name, tensor) for all that is read, to refuse what is not finite.
    state: file from which a killed run goes on, provided that every layer of the blocks before is in `done`.
    memory_bytes: activations beyond this go to disk, beside `state`; None is a quarter of the memory.
    Raises PlanError for a model that transformers cannot build or that cannot be run block by block.
    """
    device = torch.device(device)
    engine = Engine(
        source,
        layers,
        rows,
        device,
        following or Following(),
        trust_remote_code,
        check,
        Workspace(device, memory_bytes, None if state is None else state.parent),
        State(state),
    )
    engine.resume(done)
    yield engine


@dataclass(frozen=True)
class _Call:
    """How a block is called: hidden [B, T, D] first, then these."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Engine:
    """The model, both streams, and where they stand.

    unreached: layers by name that lie in no decoder block, with the reason.  first_block: where a resumed run
    goes on.
    """

    def __init__(
        self,
        source: WeightSource,
        layers: Sequence[LayerPlan],
        rows: Tensor,
        device: torch.device,
        following: Following,
        trust_remote_code: bool,
        check: Check | None,
        workspace: Workspace,
        state: State,
    ) -> None:
        self.source, self.rows, self.device, self.following = source, rows, device, following
        self.check, self.workspace, self.state = check, workspace, state
        self.dtype = _compute_dtype(source, layers, device)
        self.skeleton = build_skeleton(
            source, dtype=self.dtype, device=device, trust_remote_code=trust_remote_code
        )
        self.names = list(self.skeleton.blocks)
        self.slots = find_slots(self.skeleton, layers)
        self.layers: dict[str, list[LayerPlan]] = {name: [] for name in self.names}
        self.unreached: dict[str, str] = {}
        for layer in layers:
            param = self.slots[layer.name].param if layer.name in self.slots else ""
            block = next((name for name in self.names if param.startswith(f"{name}.")), None)
            if block is None:
                self.unreached[layer.name] = OUTSIDE
            else:
                self.layers[block].append(layer)
        self.batches = _split_rows(rows, layers, device)
        self.first_block = 0
        # by rows and tokens
        self.calls: dict[tuple[int, int], list[_Call]] = {}
        self.quantized = workspace.empty((*rows.shape, self.skeleton.width), self.dtype)
        self.full = (
            workspace.empty((*rows.shape, self.skeleton.width), self.dtype) if following.target else None
        )
        try:
            self._embed()
        # what the model's own code says of a config that contradicts itself
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as e:
            reason = one_line(e)
            raise PlanError(
                f"{source.name}: its code does not run as config.json says ({reason}); "
                "--method rtn and hqq need no model code"
            ) from e

    def resume(self, done: frozenset[str]) -> None:
        """Go on from the saved state if every layer of the blocks before it is in `done`."""
        saved = self.state.load()
        if saved is None:
            return
        before = [layer.name for name in self.names[: saved.block] for layer in self.layers[name]]
        if done.issuperset(before):
            self.first_block = saved.block
            self.quantized.copy_(saved.quantized)
            if self.full is not None and saved.full is not None:
                self.full.copy_(saved.full)

    def blocks(self) -> Iterator[Block]:
        """Decoder blocks in order; each has to be worked through before the next is asked for."""
        for index in range(self.first_block, len(self.names)):
            block = Block(self, index)
            block.load()
            with self.workspace.scope():
                block.follow_full()
                yield block
                if index + 1 < len(self.names):
                    block.replay()
                block.followed = {}
            if index + 1 < len(self.names):
                self.state.save(Saved(index + 1, self.quantized, self.full))
            block.unload()

    # ---- before the first block

    def _embed(self) -> None:
        """Fill both streams with the input of the first block, and record how every block is called."""
        model, first = self.skeleton.model, self.names[0]
        decoder = next(name for name, module in model.named_modules() if module is self.skeleton.decoder)
        around = [
            name
            for name in stored_names(self.skeleton.decoder, decoder)
            if not any(name.startswith(f"{block}.") for block in self.names)
        ]
        load(self.skeleton, self.source, around, self._dtype_of, self.device, self.check)
        for batch in self.batches:
            self.quantized[batch] = self._shell(self.rows[batch], [first], None)[0].hidden
        if self.full is not None:
            self.full.copy_(self.quantized)
        probe = Block(self, 0)
        probe.load()
        form = probe.form(self._shell(self.rows[:1], [first], None)[0])
        probe.unload()
        length = self.rows.shape[1]
        sizes = {(1, length), (1, min(length, _PROBE_TOKENS))}
        for count, tokens in sizes | {(batch.stop - batch.start, length) for batch in self.batches}:
            self.calls[count, tokens] = self._shell(self.rows[:count, :tokens], self.names, form)
        self._check_calls(self._shell(self.rows[-1:], self.names, form))
        unload(model, [n for n in around if isinstance(_owner(model, n), nn.Embedding)])

    def _check_calls(self, other: list[_Call]) -> None:
        """Refuse a model that hands its blocks more of the tokens than hidden states."""
        for name, a, b in zip(self.names, self.calls[1, self.rows.shape[1]], other, strict=True):
            if not _same([a.args, a.kwargs], [b.args, b.kwargs]):
                raise PlanError(
                    f"{self.source.name}: {name} is given more than hidden states of the tokens; calibration "
                    "cannot follow that, use --method rtn or hqq"
                )

    def _shell(self, rows: Tensor, names: list[str], form: Callable[[Tensor], Any] | None) -> list[_Call]:
        """Run the decoder on rows with the named blocks replaced by stand-ins that return form(their input);
        stop at the last of them and return how each was called."""
        calls: list[_Call] = []

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states", None)
            if not isinstance(hidden, Tensor) or hidden.dim() != 3:
                raise PlanError(
                    f"{self.source.name}: its decoder blocks do not take hidden states [batch, tokens, "
                    "width]; use --method rtn or hqq"
                )
            calls.append(_Call(hidden, args[1:], kwargs))
            if form is None or len(calls) == len(names):
                raise _Enough
            return form(hidden)

        blocks = [self.skeleton.blocks[name] for name in names]
        for block in blocks:
            # on the instance: the models ask their blocks for attributes of their class
            block.__dict__["forward"] = stand_in
        ids = rows.to(self.device)
        try:
            with torch.no_grad(), Products({}, self.dtype):
                self.skeleton.decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        except _Enough:
            pass
        finally:
            for block in blocks:
                del block.__dict__["forward"]
        return calls

    def _dtype_of(self, name: str, stored: torch.dtype) -> torch.dtype:
        # embeddings are large and read a row at a time: Products widens what is read
        return stored if isinstance(_owner(self.skeleton.model, name), nn.Embedding) else self.dtype


class _Enough(Exception):
    """A forward has shown what was wanted of it."""


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module that holds a parameter."""
    return model.get_submodule(name.rpartition(".")[0])


def _compute_dtype(source: WeightSource, layers: Sequence[LayerPlan], device: torch.device) -> torch.dtype:
    """float32 on a CPU, which has no fast half precision; the weights' own dtype on a GPU."""
    if device.type == "cpu":
        return torch.float32
    stored = {"BF16": torch.bfloat16, "F16": torch.float16}
    return stored.get(source.tensors[layers[0].source].dtype, torch.float32)


def _split_rows(rows: Tensor, layers: Sequence[LayerPlan], device: torch.device) -> list[slice]:
    """Rows that go through a block together."""
    widest = max(max(layer.shape) for layer in layers) * 4
    size = max(1, _BATCH_BYTES[device.type] // (widest * rows.shape[1]))
    return [slice(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]


def _same(a: Any, b: Any) -> bool:
    """Equality of nested arguments, tensors by value."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and not isinstance(a, Tensor)


@dataclass(frozen=True)
class _Group:
    """Layers that read one input, found by watching.

    params: in the order in which they are used; one 3-D parameter if its experts read what is routed to them.
    once: every token passes exactly once, so that the two streams can be compared.
    meets: where its output is seen added to the residual stream, a module or _OUTPUT; None if not seen.
    """

    params: tuple[str, ...]
    experts: bool
    once: bool
    meets: str | None


@dataclass(frozen=True)
class _Tail:
    """The last layer of a block, where its output meets the stream at the end: the quantized stream is there
    already, but for what the layer's new weight changes.

    weight: [N, K] that was used, stored dtype.  inputs: [R, T, K].
    """

    layer: LayerPlan
    weight: Tensor
    inputs: Tensor


class Block:
    """One decoder block, loaded.

    name: of the module.  layers: those of the plan that lie in it, in plan order.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine, self.index, self.name = engine, index, engine.names[index]
        self.module = engine.skeleton.blocks[self.name]
        self.layers = tuple(engine.layers[self.name])
        self.params: dict[str, Tensor] = {}
        self.groups: list[_Group] = []
        self.followed: dict[int, Tensor] = {}
        self.tail: _Tail | None = None
        # layers of each parameter that still have their old weight
        self.waiting = Counter(engine.slots[layer.name].param for layer in self.layers)
        self.kept = {batch.start: Kept(self._settled, engine.workspace.take) for batch in engine.batches}

    def load(self) -> None:
        """Read the weights. Planned ones keep the dtype in which they are stored, Products widens them."""
        engine = self.engine
        planned = sorted({engine.slots[layer.name].param for layer in self.layers})
        sources = {layer.source for layer in self.layers}
        stored: dict[str, Tensor] = {}

        def read(name: str, tensor: Tensor) -> None:
            if engine.check is not None:
                engine.check(name, tensor)
            if name in sources:
                stored[name] = tensor

        def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
            return dtype if name in planned else engine.dtype

        names = stored_names(self.module, self.name)
        load(engine.skeleton, engine.source, names, dtype_of, engine.device, read)
        self.params = {name: engine.skeleton.model.get_parameter(name).data for name in planned}
        for layer in self.layers:
            wanted = Slot(layer.source, layer.expert, layer.rows, layer.transposed).view(stored[layer.source])
            found = self.weight(layer)
            if wanted.shape != found.shape or not torch.equal(wanted.to(found.device), found):
                raise PlanError(
                    f"{layer.source}: transformers rearranges this weight in a way that calibration cannot "
                    "follow; use --method rtn or hqq"
                )

    def unload(self) -> None:
        self.params, self.kept = {}, {}
        unload(self.engine.skeleton.model, stored_names(self.module, self.name))

    def weight(self, layer: LayerPlan) -> Tensor:
        """The layer's weight [N, K] as it stands: a view, in the dtype in which it is stored."""
        slot = self.engine.slots[layer.name]
        return slot.view(self.params[slot.param])

    def _settled(self, param: str) -> bool:
        """Every layer of the parameter has its new weight; experts do not count, they take turns."""
        return not self.waiting[param] and self.params[param].dim() == 2

    # ---- running

    def forward(
        self,
        hidden: Tensor,
        call: _Call,
        before: Callable[[Product], None] | None = None,
        after: Callable[[Product, Tensor], None] | None = None,
        entering: dict[str, Callable[[Tensor], None]] | None = None,
        kept: Kept | None = None,
    ) -> Any:
        """What the block returns for hidden [B, T, D], None if a callback had seen enough.

        before, after, kept: for each product that uses a planned parameter (see Products).
        entering: by name of a module in the block, called with the tensor that it is given.
        """
        hooks = [
            self.module.get_submodule(name).register_forward_pre_hook(_input_hook(seen), with_kwargs=True)
            for name, seen in (entering or {}).items()
        ]
        try:
            with (
                torch.no_grad(),
                nullcontext() if kept is None else kept.submodules(self.module),
                Products(self.params, self.engine.dtype, before, after, kept),
            ):
                return self.module(hidden, *call.args, **call.kwargs)
        except _Enough:
            return None
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, stream: Tensor, batch: slice, **callbacks: Any) -> Tensor | None:
        """The block's output [B, T, D] for a batch of a stream, None if a callback had seen enough."""
        # a copy: a block may write into what it is given
        hidden = stream[batch].to(self.engine.device, self.engine.dtype, copy=True)
        output = self.forward(
            hidden, self.engine.calls[hidden.shape[0], hidden.shape[1]][self.index], **callbacks
        )
        return output[0] if isinstance(output, tuple) else output

    def form(self, call: _Call) -> Callable[[Tensor], Any]:
        """How blocks of this model wrap the hidden states that they return."""
        output = self.forward(call.hidden, call)
        if isinstance(output, tuple):
            rest = [None] * (len(output) - 1)
            return lambda hidden: (hidden, *rest)
        return lambda hidden: hidden

    def replay(self) -> None:
        """Move the quantized stream to the next block."""
        stream = self.engine.quantized
        if self.tail is not None:
            change = (self.weight(self.tail.layer).float() - self.tail.weight.float()).to(self.engine.dtype)
            for batch in self.engine.batches:
                stream[batch] += self.tail.inputs[batch].to(self.engine.device) @ change.T
            self.tail = None
            return
        for batch in self.engine.batches:
            output = self.run(stream, batch, kept=self.kept[batch.start])
            assert output is not None
            stream[batch] = output

    # ---- measuring

    def stages(self) -> Iterator[Stage]:
        """Groups of layers in the order in which they run. The layers of a stage have to be replaced before
        the next is asked for."""
        left = {layer.name: layer for layer in self.layers}
        for i, group in enumerate(self.groups):
            members = [layer for layer in self.layers if self.engine.slots[layer.name].param in group.params]
            for part in self._affordable(members):
                for layer in part:
                    del left[layer.name]
                last = not left and i + 1 == len(self.groups)
                yield Stage(self, part, self._measure(group, part, self.followed.get(i), last))
        if left:
            yield Stage(self, list(left.values()), {})

    def _affordable(self, layers: list[LayerPlan]) -> list[list[LayerPlan]]:
        """What of a group is measured in one pass: all, or the experts whose Hessians fit together."""
        hessian_bytes = 4 * layers[0].shape[1] ** 2
        at_once = max(1, _EXPERT_BYTES // hessian_bytes)
        experts = sorted({self.engine.slots[layer.name].expert or 0 for layer in layers})
        parts = [set(experts[i : i + at_once]) for i in range(0, len(experts), at_once)]
        return [
            [layer for layer in layers if (self.engine.slots[layer.name].expert or 0) in part]
            for part in parts
        ]

    def _find_groups(self) -> list[_Group]:
        """Run the beginning of a row and see which products read the same input and which meet the residual
        stream; the whole row if that leaves out a weight, as it may where each expert is a module."""
        stream = self.engine.quantized if self.engine.full is None else self.engine.full
        groups = self._watch(stream[:, :_PROBE_TOKENS])
        if self.params.keys() == {param for group in groups for param in group.params}:
            return groups
        return self._watch(stream)

    def _watch(self, stream: Tensor) -> list[_Group]:
        """The groups that the first row of a stream shows."""
        hidden = stream[:1].to(self.engine.device, self.engine.dtype)
        events: list[_Event] = []

        def made(product: Product, y: Tensor) -> None:
            # either may be added to in place later
            events.append(_Event(product, "", y.clone(), product.x._version))

        def entered(name: str) -> Callable[[Tensor], None]:
            return lambda z: events.append(_Event(None, name, z.clone()))

        inside = {name: entered(name) for name, _ in self.module.named_modules() if name}
        output = self.run(stream, slice(0, 1), after=made, entering=inside)
        assert output is not None
        products = [event.product for event in events if event.product is not None]
        versions: dict[str, int] = {}
        for event in events:
            if event.product is not None:
                versions.setdefault(event.product.param, event.version)
        calls = Counter(product.param for product in products)
        meets = _meetings(hidden, events, output) if self.engine.following.residual else {}
        inputs: dict[Any, list[Product]] = {}
        keys: dict[str, Any] = {}
        for product in products:
            # x is alive in events, so that its address is its own until it is written into
            place = product.x.data_ptr(), product.x.numel(), versions[product.param]
            key = product.param if product.expert is not None else place
            inputs.setdefault(keys.setdefault(product.param, key), []).append(product)
        groups = []
        for members in inputs.values():
            params = tuple(dict.fromkeys(product.param for product in members))
            first = members[0]
            experts = first.expert is not None
            every = first.x.numel() // first.x.shape[-1] == hidden.shape[1]
            once = every and not experts and all(calls[param] == 1 for param in params)
            # where the stream is met, its input has to be what it was
            steady = first.x._version == versions[params[0]]
            alone = meets.get(params[0]) if once and steady and len(params) == 1 else None
            groups.append(_Group(params, experts, once, alone))
        return groups

    def follow_full(self) -> None:
        """Find the groups, move the full-precision stream to the next block, and keep what it held for each
        group: inputs x~ [R, T, K], or the residual stream z~ [R, T, D] where the group's output meets it."""
        self.groups = self._find_groups()
        full, engine = self.engine.full, self.engine
        if full is None:
            return

        def keep(i: int, batch: slice, value: Tensor) -> None:
            if i not in self.followed:
                self.followed[i] = engine.workspace.empty((*engine.rows.shape, value.shape[-1]), engine.dtype)
            self.followed[i][batch] = value.view(-1, engine.rows.shape[1], value.shape[-1])

        inputs = {g.params[0]: i for i, g in enumerate(self.groups) if g.once and g.meets is None}
        meetings = {g.meets: i for i, g in enumerate(self.groups) if g.meets is not None}
        for batch in engine.batches:

            def seen(product: Product, batch: slice = batch) -> None:
                if product.param in inputs:
                    keep(inputs[product.param], batch, product.x)

            def entered(i: int, batch: slice = batch) -> Callable[[Tensor], None]:
                return lambda z: keep(i, batch, z)

            entering = {name: entered(i) for name, i in meetings.items() if name != _OUTPUT}
            output = self.run(full, batch, before=seen, entering=entering)
            assert output is not None
            full[batch] = output
        if _OUTPUT in meetings:
            self.followed[meetings[_OUTPUT]] = full

    def _measure(
        self, group: _Group, layers: list[LayerPlan], followed: Tensor | None, last: bool
    ) -> dict[int | None, Moments]:
        """Sums over the quantized stream for layers of a group, by expert (None for what is no expert).

        last: no other layer is left; if its output meets the stream at the block's end, the quantized stream
        is moved there.
        """
        engine = self.engine
        moments: dict[int | None, Moments] = {}
        wanted = {engine.slots[layer.name].expert for layer in layers}
        meets = None if followed is None else group.meets

        def add(expert: int | None, x: Tensor, full: Tensor | None = None, gap: Tensor | None = None) -> None:
            if expert not in moments:
                moments[expert] = start_moments(
                    x.shape[-1],
                    engine.device,
                    shift=full is not None,
                    gap_features=0 if gap is None else gap.shape[-1],
                )
            moments[expert] = add_tokens(moments[expert], x, full=full, gap=gap)

        for batch in engine.batches:
            target = None if followed is None else followed[batch].to(engine.device)
            inputs: list[Tensor] = []

            def seen(product: Product, target: Tensor | None = target, inputs: list[Tensor] = inputs) -> None:
                if product.param != group.params[0] or product.expert not in wanted:
                    return
                if meets is not None:
                    inputs.append(product.x)
                    return
                add(product.expert, product.x, full=target)
                if group.once:
                    raise _Enough

            def met(z: Tensor, target: Tensor | None = target, inputs: list[Tensor] = inputs) -> None:
                assert target is not None
                add(None, inputs[0], gap=target - z.view_as(target))
                raise _Enough

            entering = {meets: met} if meets else {}
            callbacks = {"before": seen, "entering": entering, "kept": self.kept[batch.start]}
            output = self.run(engine.quantized, batch, **callbacks)
            if meets != _OUTPUT:
                continue
            assert output is not None
            assert target is not None
            (x,) = inputs
            add(None, x, gap=target - output)
            if last:
                if self.tail is None:
                    kept = engine.workspace.empty((*engine.rows.shape, x.shape[-1]), engine.dtype)
                    self.tail = _Tail(layers[0], self.weight(layers[0]).clone(), kept)
                self.tail.inputs[batch] = x.view(*target.shape[:2], -1)
                engine.quantized[batch] = output
        return moments


class Stage:
    """Layers that can be solved now."""

    def __init__(self, block: Block, layers: list[LayerPlan], moments: dict[int | None, Moments]) -> None:
        self.block, self.layers, self.moments = block, layers, moments

    def work(self) -> Iterator[LayerWork]:
        """The layers with weights and statistics, one at a time; sums are dropped after their last use."""
        shared: tuple[int | None, Tensor] | None = None
        experts = [self.block.engine.slots[layer.name].expert for layer in self.layers]
        for i, (layer, expert) in enumerate(zip(self.layers, experts, strict=True)):
            weight = self.block.weight(layer).float()
            last = expert not in experts[i + 1 :]
            moments = self.moments.pop(expert, None) if last else self.moments.get(expert)
            tokens = 0 if moments is None else moments.tokens
            if moments is None or (expert is not None and tokens < EXPERT_FLOOR):
                reason = f"only {tokens} calibration tokens were routed to it" if tokens else NOT_REACHED
                yield LayerWork(layer, weight, None, reason)
                continue
            try:
                stats = finish(moments, weight)
            except CalibrationError as e:
                raise CalibrationError(f"{layer.name}: {e}") from None
            del moments
            if shared is None or shared[0] != expert:
                shared = expert, stats.hessian
            yield LayerWork(layer, weight, LayerStats(shared[1], stats.tokens, stats.cross))

    def replace(self, layer: LayerPlan, weight: Tensor) -> None:
        """From here on the quantized stream sees weight [N, K] in this layer, rounded to the stored dtype as
        engines do before they multiply."""
        block, param = self.block, self.block.engine.slots[layer.name].param
        block.weight(layer).copy_(weight)
        block.waiting[param] -= 1


def _input_hook(seen: Callable[[Tensor], None]) -> Callable[..., None]:
    """A forward pre-hook that shows the first tensor a module is given."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)), None)
        if first is not None:
            seen(first)

    return hook


@dataclass(frozen=True)
class _Event:
    """What happened in a forward: a product gave `tensor`, or the module called `entered` was given it.

    version: how often the product's input had been written into by then.
    """

    product: Product | None
    entered: str
    tensor: Tensor
    version: int = 0


def _meetings(hidden: Tensor, events: list[_Event], output: Tensor) -> dict[str, str]:
    """Where the output of a product is added to the residual stream: parameter -> module whose input is the
    stream after it, or _OUTPUT."""
    entries = Counter(event.entered for event in events)
    stream = hidden.reshape(-1, hidden.shape[-1])
    meets: dict[str, str] = {}
    earlier: list[Tensor] = []
    for i, event in enumerate(events):
        product = event.product
        if product is None or product.expert is not None or event.tensor.numel() != hidden.numel():
            continue
        y = event.tensor.reshape(stream.shape)
        # parallel branches meet the stream together with one that ran before
        sums = [stream + y, *(stream + y + other for other in earlier)]
        places = [(e.entered, e.tensor) for e in events[i + 1 :] if e.entered and entries[e.entered] == 1]
        for name, z in [*places, (_OUTPUT, output)]:
            if z.numel() == hidden.numel() and any(_is_sum(z.reshape(stream.shape), s, y) for s in sums):
                meets[product.param] = name
                stream, earlier = z.reshape(stream.shape), []
                break
        else:
            earlier.append(y)
    return meets


def _is_sum(z: Tensor, total: Tensor, y: Tensor) -> bool:
    """z is total up to rounding, and would not be without y."""
    error = (z.float() - total.float()).norm()
    rounding = 4 * torch.finfo(z.dtype).eps * z.float().norm()
    return bool(error <= rounding) and bool(error <= 0.1 * y.float().norm())
