"""Plan -> CUDA C++: the kernel's frame, roles, barriers, control flow.  Ops' emit rules write the rest, one step at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from ..errors import Line, MosaicGpuError, ResourceExceeded
from ..ops import registry
from ..ops.barriers import BarrierUse
from ..ops.registry import Generation, Scope
from ..plan.model import BarrierArray, Block, Plan, Role, Step
from ..program import Equation
from .emit_mma import MmaEmitter
from .emit_scans import ScanEmitter
from .prelude import generated, prelude_for
from .scalars import scalars
from .text import stored_type

ENTRY = "kernel"
# What takes operands in uniform registers.
UNIFORM = (
    "tcgen05_mma",
    "tcgen05_commit_arrive",
    "async_copy_scales_to_tmem",
    "async_copy_sparse_metadata_to_tmem",
    "async_copy_smem_to_tmem",
)
HELPERS = """
DI u64 descriptor(u32 low, u32 high) { u64 d; asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high)); return d; }
DI u32 as_u32(u32 x) { return x; }
DI u32 as_u32(int x) { return (u32)x; }
DI u32 as_u32(float x) { return __float_as_uint(x); }
DI void set_bits(u32& r, u32 x) { r = x; }
DI void set_bits(int& r, u32 x) { r = (int)x; }
DI void set_bits(float& r, u32 x) { r = __uint_as_float(x); }
DI void set_half(u32& r, int high, u16 x) { r = high ? (r & 0xffffu) | ((u32)x << 16) : (r & 0xffff0000u) | x; }
template <int SPAN> DI u32 swizzle(u32 offset) { return offset ^ (((offset >> 7) & (SPAN / 16 - 1)) << 4); }
"""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter, in order.  kind: 'map' (index), 'pointer', 'multicast' (input), 'dim' (input, axis), 'grid' (axis)."""

    kind: str
    index: int
    axis: int = 0


def parameters(plan: Plan) -> tuple[Parameter, ...]:
    """The kernel's parameters: TMA descriptors, addresses, extents, and grid extents where blockIdx cannot carry them."""
    out = [Parameter("map", i) for i in range(len(plan.maps))]
    out += [Parameter("pointer", i) for i in plan.pointers]
    out += [Parameter("multicast", i) for i in plan.multicast]
    out += [Parameter("dim", d.input, d.axis) for d in plan.dims]
    if len(plan.program.grid) > 3:
        out += [Parameter("grid", i) for i in range(len(plan.program.grid) - 2)]
    return tuple(out)


def emit(plan: Plan) -> str:
    """The whole CUDA C++ source of a plan."""
    return Emitter(plan).source()


class Emitter(ScanEmitter, MmaEmitter):
    """Writes one kernel."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.approx = plan.program.params.approx_math
        self.in_pairs = plan.generation is Generation.SM100
        self.single_thread = False
        self.together = False
        self.condition = ""  # of arrivals that a branch consists of, which needs no branch then
        self.scope = Scope.WARPGROUP
        self.count = 0
        self.last_line: Line | None = None
        self.at_line = False  # whether the next line of C++ has the number of last_line already

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def line(self, text: str) -> None:
        """A line of C++; all that a step emits has the number of its Python line, for ptxas, profilers and debuggers."""
        if self.last_line is not None and not text.startswith("#line"):
            pragma = text.startswith("#")  # belongs to the statement below it, so nothing comes between them
            if not self.at_line or pragma:
                super().line(f"#line {max(self.last_line.number - pragma, 1)}")
            self.at_line = pragma
        super().line(text)

    @contextlib.contextmanager
    def block(self, head: str = "") -> Iterator[None]:
        with super().block(head):
            yield
            self.after_loads(self.depth)  # their registers go out of scope

    # ---- the frame ------------------------------------------------------------------------------------------------------
    def source(self) -> str:
        plan = self.plan
        self._prologue()
        roles = plan.roles
        for k, role in enumerate(roles):
            if len(roles) == 1:
                head = ""
            elif k == len(roles) - 1:
                head = "else"
            else:
                test = " || ".join(f"wg == {i}" for i in role.indices)
                head = f"{'else ' if k else ''}if ({test})"
            with self.block(head):
                self._role(role)
        self._epilogue()
        body = scalars("\n".join(self.lines))
        names = ", ".join(self._parameter(p) for p in parameters(plan))
        signature = f'extern "C" __global__ void __launch_bounds__({plan.threads}, 1)\n{ENTRY}({names}) {{'
        head = HELPERS + "".join(self.functions[n] for n in sorted(self.functions))
        text = f"{signature}\n{body}\n}}\n"
        return prelude_for(head + text) + "\n" + generated(head) + '\n#line 1 "/mosaic_gpu/kernel.cu"\n' + text

    def _parameter(self, p: Parameter) -> str:
        if p.kind == "map":
            return f"const __grid_constant__ TensorMap map{p.index}"
        if p.kind == "pointer":
            return f"{stored_type(self.plan.program.inputs[p.index].dtype)}* p{p.index}"
        if p.kind == "multicast":
            return f"{stored_type(self.plan.program.inputs[p.index].dtype)}* multicast{p.index}"
        return f"int n{p.index}_{p.axis}" if p.kind == "dim" else f"int grid_n{p.index}"

    def _prologue(self) -> None:
        plan, program = self.plan, self.plan.program
        self.line("extern __shared__ __align__(1024) unsigned char shared[];")
        self.line("const u32 smem = shared_address(shared);")
        # As descriptors count: 16 bytes each, within the block (in a cluster the higher bits of an address name the block).
        self.line("const u32 smem_units = (smem & 0x3ffff) >> 4; (void)smem_units;")
        self.line("const int wg = uniform(threadIdx.x / 128), tid = threadIdx.x % 128, lane = threadIdx.x % 32;")
        self.line("(void)smem; (void)wg; (void)tid; (void)lane;")
        blocks = math.prod(program.cluster)
        if program.cluster:  # of one block, too: it has a rank
            self.line(f"const int rank = blockIdx.x % {blocks}; (void)rank;")
            below = blocks
            for i, n in enumerate(program.cluster):
                below //= n
                self.line(f"const int cluster_{i} = rank / {below} % {n}; (void)cluster_{i};")
        if plan.barriers:
            with self.block("if (threadIdx.x == 0)"):
                for b in plan.barriers.values():
                    with self.block(f"for (int i = 0; i < {b.count}; ++i)"):
                        self.line(f"mbarrier_init(smem + {b.offset} + 8 * i, {b.expected});")
                self.line("fence_mbarrier_init();")
        pair = 2 if plan.tmem_pair else 1
        if plan.tmem_columns:
            with self.block("if (threadIdx.x < 32)"):
                self.line(f"tmem_alloc<{plan.tmem_columns}, {pair}>(smem + {plan.tmem_address_offset});")
                self.line(f"tmem_relinquish<{pair}>();")
            self.line("tcgen05_fence_before();")
        if blocks > 1:
            self.line("cluster_arrive(); cluster_wait();")
        elif plan.barriers or plan.tmem_columns:
            self.line("__syncthreads();")
        if plan.tmem_columns:
            self.line("tcgen05_fence_after();")
            self.line(f"const u32 tmem = *(volatile u32*)(shared + {plan.tmem_address_offset});")

    def _epilogue(self) -> None:
        pair = self.plan.tmem_pair
        if self.plan.tmem_columns:
            self.line("tcgen05_fence_before();")
            # Of a pair, both blocks must have stopped using it.
            self.line("cluster_arrive(); cluster_wait();" if pair else "__syncthreads();")
            self.line("tcgen05_fence_after();")
            self.line(f"if (threadIdx.x < 32) tmem_dealloc<{self.plan.tmem_columns}, {2 if pair else 1}>(tmem);")
        if math.prod(self.plan.program.cluster) > 1:
            # A block must not go while its peers may still write to its shared memory or arrive on its barriers.
            self.line("cluster_arrive(); cluster_wait();")

    def _role(self, role: Role) -> None:
        outer = (self.layouts, self.single_thread, self.together, self.scope, self.overtakes)
        # The tensor core's operands are uniform registers.  A warp that branches as a whole computes descriptors there, one
        # whose other lanes wait aside moves each of them (16 instructions a product instead of 3), so it stays together.
        self.together = role.scope is Scope.WARP and _issues(role.body, UNIFORM)
        single = role.single_thread and not self.together
        self.layouts, self.single_thread, self.scope = role.layouts, single, role.scope
        self.overtakes = _issues(role.body, ("wgmma",))
        self.line(f"// role {role.name}" + (", one thread" if single else ""))
        if role.scope is Scope.WARPGROUP:
            # In each: from the kernel's start on, ptxas 13.0 keeps it in local memory where roles have few registers.
            self.line("const int warp = uniform(threadIdx.x / 32 % 4); (void)warp;")
        if role.scratch_bytes:
            first = min(role.indices)
            self.scratch = f"{role.scratch}" + (f" + (wg - {first}) * {role.scratch_bytes}" if role.indices[1:] else "")
        waited = list(dict.fromkeys(_waited(role.body)))
        if role.scope is Scope.WARPGROUP and not single:
            self._phases(waited)
        if single:
            for s in _register_steps(role.body):
                self._step(s)
            with self.block("if (tid == 0)" if role.scope is Scope.WARPGROUP else "if (lane == 0)"):
                if role.scope is Scope.WARPGROUP:
                    self._phases(waited)
                self.steps(role.body.steps)
            if role.scope is Scope.WARP:  # the other lanes learn which phases their warp has seen
                self.line("__syncwarp();")
                for register in dict.fromkeys(self.phase(array)[0] for array in waited):
                    self.line(f"{register} = uniform({register});")
        else:
            self.steps(role.body.steps)
        self.layouts, self.single_thread, self.together, self.scope, self.overtakes = outer

    def _phases(self, waited: Sequence[int]) -> None:
        """One bit a barrier: the parity this role waits for next.  Its warps, under `warp_map`, use the same."""
        for register in dict.fromkeys(self.phase(array)[0] for array in waited):
            self.line(f"u32 {register} = 0;")

    def warp_roles(self, roles: Sequence[Role]) -> None:
        """The four warps of a warpgroup, each in its branch."""
        for k, role in enumerate(roles):
            test = " || ".join(f"warp == {i}" for i in role.indices)
            head = "" if len(roles) == 1 else ("else" if k == len(roles) - 1 else f"{'else ' if k else ''}if ({test})")
            for s in (role.body.inputs,):
                for v in s:
                    self.names[v.id] = "warp"
            with self.block(head):
                self._role(role)

    # ---- steps ----------------------------------------------------------------------------------------------------------
    def steps(self, steps: Sequence[Step]) -> None:
        for s in steps:
            if self.single_thread and s.equation.op == "set_max_registers":
                continue  # done by the whole warpgroup before the thread was elected
            self._step(s)

    def _step(self, s: Step) -> None:
        e: Equation = s.equation
        if e.line is not None and e.line != self.last_line:
            self.line(f'#line {e.line.number} "{e.line.file}"')
            self.last_line, self.at_line = e.line, True
        rule = registry.lookup(e.op, (self.plan.generation, self.scope), e.line).emit_rules[
            (self.plan.generation, self.scope)
        ]
        try:
            rule(self, s)
        except MosaicGpuError as error:
            if error.line is None:
                error.line = e.line
            raise

    # ---- who runs ---------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def elected(self, tcgen05: bool = False) -> Iterator[None]:
        """One thread of the role's unit: always the same one, as groups of copies and commits belong to a thread.

        tcgen05: for its products and their commits, whose operands are uniform registers of a warp that stays together.
        """
        if self.scope is Scope.WARPGROUP:
            one = "warp == 0 && elect_one()" if tcgen05 else "tid == 0"
        else:
            one = "elect_one()" if self.together else "lane == 0"
        head = "" if self.single_thread else f"if ({one})"
        with self.block(head):
            yield

    def whole_warpgroup(self, text: str) -> None:
        self.line(text)

    def role_sync(self) -> None:
        """All threads of the unit meet."""
        if self.single_thread:
            return
        if self.scope is Scope.WARP:
            self.line("__syncwarp();")
            return
        self.line(f"named_barrier_sync({self._role_barrier()}, 128);")

    def any_of_role(self, condition: str) -> str:
        """Whether `condition` holds for a thread of the unit, the same in all of them, which meet."""
        if self.single_thread:
            return condition
        if self.scope is Scope.WARP:
            return f"__any_sync(~0u, {condition}) != 0"
        return f"named_barrier_any({self._role_barrier()}, 128, {condition})"

    def _role_barrier(self) -> str:
        """The named barrier at which the threads of a warpgroup meet."""
        first = max((a.id + a.count for a in self.plan.named_barriers.values()), default=1)
        if first + self.plan.program.num_threads > 16:
            raise ResourceExceeded(
                f"{first - 1} named barriers and one for each of {self.plan.program.num_threads} warpgroups to "
                "meet at; a block has 16, of which 0 is the whole block"
            )
        return f"{first} + wg"

    def elected_after_sync(self, text: str) -> None:
        """One thread acts once all have come this far."""
        self.role_sync()
        with self.elected():
            self.line(text)

    # ---- barriers -----------------------------------------------------------------------------------------------------------
    def phase(self, array: int) -> tuple[str, int]:
        """The variable that holds an array's parities, which arrays share as far as they fit, and its first bit."""
        register = bit = 0
        for id, other in self.plan.barriers.items():
            if bit + other.count > 32:
                register, bit = register + 1, 0
            if id == array:
                break
            bit += other.count
        return f"phases{register}", bit

    def barrier_address(self, use: BarrierUse, slot: str | None = None) -> str:
        offset = self.plan.barriers[use.array].offset
        if slot is None and use.slot.static:
            return f"smem + {offset + 8 * use.slot.const}"
        return f"smem + {offset} + 8 * {slot or self.affine(use.slot)}"

    def arrive_cluster(self, array: BarrierArray, bar: str, release: bool) -> None:
        """One of the user's arrivals in every block along the barrier's axes.  release: at the cluster's scope."""
        base, offsets = self._peers(array.info.collective_axes)
        whole = self.single_thread or self.scope is Scope.WARP  # one thread speaks for the role
        arrive = "mbarrier_arrive_cluster_release" if release else "mbarrier_arrive_cluster"
        if array.unit == 4 and not whole:  # each warp is one of the four, and a lane of it serves one block
            step = offsets[1] - offsets[0] if len(offsets) > 1 else 1
            even = offsets == [i * step for i in range(len(offsets))]
            self.line("__syncwarp();")
            if even:
                self.line(f"if (lane < {len(offsets)}) {arrive}({bar}, {base} + {step} * lane, 1);")
            else:
                for i, o in enumerate(offsets):
                    self.line(f"if (lane == {i}) {arrive}({bar}, {base} + {o}, 1);")
            return
        self.role_sync()
        with self.elected():
            for o in offsets:
                self.line(f"{arrive}({bar}, {base} + {o}, {array.unit});")

    def _peers(self, axes: tuple[str, ...]) -> tuple[str, list[int]]:
        """(rank of the first block along `axes`, offsets of all of them)."""
        program = self.plan.program
        sizes = [program.cluster[program.cluster_names.index(a)] for a in axes]
        strides = [math.prod(program.cluster[program.cluster_names.index(a) + 1 :]) for a in axes]
        own = " - ".join(
            ["rank", *(f"cluster_{program.cluster_names.index(a)} * {s}" for a, s in zip(axes, strides, strict=True))]
        )
        offsets = [
            sum(i * s for i, s in zip(c, strides, strict=True)) for c in itertools.product(*(range(n) for n in sizes))
        ]
        return f"({own})", offsets

    def multicast(self, axes: tuple[str, ...]) -> tuple[str, str]:
        """(this block's position among those along `axes`, 16-bit mask of them)."""
        program = self.plan.program
        base, offsets = self._peers(axes)
        position = "0"
        for a in axes:
            i = program.cluster_names.index(a)
            position = f"({position}) * {program.cluster[i]} + cluster_{i}" if position != "0" else f"cluster_{i}"
        return position, f"(u16)({sum(1 << o for o in offsets)}u << {base})"

    # ---- where am I -----------------------------------------------------------------------------------------------------------
    def axis(
        self, kind: str, axis: int, block: tuple[str, str, str] = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
    ) -> str:
        """block: where a block is in the grid that was launched; that of this one, or one that it has taken over."""
        x, y, z = block
        if kind == "thread":
            return "wg"
        if kind == "cluster":
            return f"cluster_{axis}" if math.prod(self.plan.program.cluster) > 1 else "0"
        grid = self.plan.program.grid
        blocks = math.prod(self.plan.program.cluster)
        from_end = len(grid) - 1 - axis
        if from_end == 0:
            return f"(int)({x} / {blocks})" if blocks > 1 else f"(int){x}"
        if from_end == 1:
            return f"(int){y}"
        if len(grid) == 3:
            return f"(int){z}"
        below = " * ".join(["1", *(f"grid_n{i}" for i in range(axis + 1, len(grid) - 2))])
        return f"((int){z} / ({below}) % grid_n{axis})"

    def axis_size(self, axis: int) -> str:
        grid = self.plan.program.grid
        blocks = math.prod(self.plan.program.cluster)
        from_end = len(grid) - 1 - axis
        if from_end == 0:
            return f"(int)(gridDim.x / {blocks})" if blocks > 1 else "(int)gridDim.x"
        if from_end == 1:
            return "(int)gridDim.y"
        return "(int)gridDim.z" if len(grid) == 3 else f"grid_n{axis}"


def launch_grid(plan: Plan) -> tuple[int, int, int]:
    """gridDim (x, y, z) for the program's grid: the last axis in x (with the cluster), the second last in y, the rest in z."""
    grid = plan.program.grid
    x = (grid[-1] if grid else 1) * math.prod(plan.program.cluster)
    return x, grid[-2] if len(grid) > 1 else 1, math.prod(grid[:-2])


def _register_steps(body: Block) -> Iterator[Step]:
    for s in body.steps:
        if s.equation.op == "set_max_registers":
            yield s
        elif s.equation.op == "run_scoped":
            yield from _register_steps(s.regions[0])


def _issues(body: Block, ops: Sequence[str]) -> bool:
    """Whether a role does one of these operations."""
    return any(s.equation.op in ops or any(_issues(r, ops) for r in s.regions) for s in body.steps)


def _waited(body: Block) -> Iterator[int]:
    """Barrier arrays that a role, or a warp of it, waits on."""
    for s in body.steps:
        if s.equation.op in ("barrier_wait", "barrier_test"):
            yield s.data.array
        if s.equation.op == "warp_map":
            for role in s.data:
                yield from _waited(role.body)
        for r in s.regions:
            yield from _waited(r)


__all__ = ["ENTRY", "Emitter", "Parameter", "emit", "launch_grid", "parameters"]
