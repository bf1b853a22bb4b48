from __future__ import annotations

from collections.abc import Callable

import pytest

from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.errors import ToolchainError

USER_FILE = "/home/someone/kernel.py"


@pytest.fixture(scope="module")
def matmul(consumer: Callable[..., str], plain_loop: str) -> sass.Function:
    compiled = compile_cuda(consumer(plain_loop, n=256, first_line=100), arch="sm_90a", name="/k.cu")
    (function,) = sass.read_cubin(compiled.cubin)
    return function


def test_counts(matmul: sass.Function) -> None:
    counts = matmul.counts()
    assert matmul.name == "kernel"
    assert counts["HGMMA"] == 4 and counts["UTMALDG"] >= 2 and counts["USETMAXREG"] == 2
    assert counts["WARPGROUP"] == len(matmul.find("WARPGROUP.ARRIVE")) + len(matmul.find("WARPGROUP.DEPBAR")) == 2
    assert len(matmul.find("HGMMA.64x256x16.F32.BF16")) == 4
    assert matmul.find("HGMM") == []
    assert matmul.spills == 0


def test_register_requests_and_what_is_behind_them(matmul: sass.Function) -> None:
    by_kind = {request.kind: request for request in matmul.register_requests}
    assert (by_kind["increase"].value, by_kind["decrease"].value) == (232, 40)
    assert 128 <= by_kind["increase"].highest_register < 168
    assert by_kind["decrease"].highest_register < 40
    assert matmul.highest_register() == by_kind["increase"].highest_register


def test_loops(matmul: sass.Function) -> None:
    ((loop, products),) = matmul.loops_with()
    assert products == 4 and matmul.counts(loop.body)["WARPGROUP"] == 2
    assert any(other.body < loop.body for other in matmul.loops)  # the wait for a full slot
    assert matmul.loops_with(frozenset({"NOTHING"})) == ()


def test_lines_are_those_of_the_source(matmul: sass.Function) -> None:
    def places(opcode: str) -> list[tuple[tuple[str, int], ...]]:
        return [matmul.instructions[index].places for index in matmul.find(opcode)]

    assert places("WARPGROUP.ARRIVE") == [(("/mosaic_gpu/prelude/wgmma.cuh", 4), (USER_FILE, 104))]
    assert {place for (*_, place) in places("SYNCS.ARRIVE.TRANS64.A1T0")} == {(USER_FILE, 111)}
    # ptxas writes no line for a product; the disassembler shows that of the instruction before it.
    for product in matmul.find("HGMMA"):
        place = matmul.instructions[product].place
        assert place is not None and place[0] == USER_FILE and 102 <= place[1] <= 112


def test_every_instruction_is_read(matmul: sass.Function) -> None:
    addresses = [instruction.address for instruction in matmul.instructions]
    assert addresses == list(range(0, 16 * len(addresses), 16))
    reached = matmul.reachable(0)
    lost = [matmul.instructions[i].mnemonic for i in range(len(addresses)) if i not in reached]
    assert set(lost) <= {"NOP", "BRA"}  # what pads the end


def test_spills_and_called_functions() -> None:
    source = """
__device__ __noinline__ int helper(int* p) {
  int a[64];
  for (int i = 0; i < 64; i++) a[i] = p[i];
  return a[p[70] & 63];
}
extern "C" __global__ void k(int* p) { if (p[3] > 2) p[0] = helper(p); else p[1] = 5; }
"""
    (function,) = sass.read_cubin(compile_cuda(source, arch="sm_90a", name="/k.cu").cubin)
    assert function.spills > 0
    (call,) = function.find("CALL")
    assert len(function.successors[call]) == 2
    assert set(function.find("STL")) <= function.reachable(call)


def test_several_kernels_and_a_switch() -> None:
    cases = "".join(f"case {i}: p[{i}] = p[{i + 9}] * {i}; p[{i + 7}] -= 3; break;" for i in range(12))
    source = f"""
extern "C" __global__ void first(int* p) {{ switch (p[0]) {{ {cases} }} p[100] = 1; }}
extern "C" __global__ void second(int* p, int n) {{ for (int i = 0; i < n; i++) p[i * 7] += p[i]; }}
"""
    functions = {f.name: f for f in sass.read_cubin(compile_cuda(source, arch="sm_90a", name="/k.cu").cubin)}
    assert set(functions) == {"first", "second"}
    first, second = functions["first"], functions["second"]
    assert set(first.find("STG")) <= first.reachable(0)
    assert second.loops and not first.loops


TEXT = """
	.section	.text.made_up,"ax",@progbits
made_up:
.text.made_up:
	//## File "/mosaic_gpu/prelude/a.cuh", line 6 inlined at "/user.py", line 18
	//## File "/user.py", line 18
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   BSSY B0, `(.L_x_4) ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
	//## File "/user.py", line 20
        /*0030*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
.L_x_1:
        /*0040*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0050*/                   BRA.U UP0, `(.L_x_1) ;
        /*0060*/               @P1 EXIT ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0090*/                   BRA.U !UP0, `(.L_x_2) ;
        /*00a0*/                   BRX R4 -0x40     (*"BRANCH_TARGETS .L_x_3,.L_x_4"*) ;
.L_x_3:
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR4], R24, gsb0 ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   BSYNC B0 ;
        /*00e0*/                   RET.REL.NODEC R20 `(made_up) ;
"""


def test_control_flow_of_a_text() -> None:
    (function,) = sass.parse(TEXT)
    successors = dict(enumerate(function.successors))
    assert successors[1] == (13, 2)  # the place of reconvergence
    assert successors[2] == (8, 3)
    assert successors[5] == (4, 6)  # its condition is an operand
    assert successors[6] == (7,) and successors[7] == ()
    assert successors[10] == (11, 13)
    assert successors[14] == ()
    assert [loop.head for loop in function.loops] == [4, 8]
    assert [(r.kind, r.value, r.highest_register) for r in function.register_requests] == [
        ("decrease", 40, 11),
        ("increase", 232, 103),
    ]
    assert function.instructions[0].places == (("/mosaic_gpu/prelude/a.cuh", 6), ("/user.py", 18))
    assert function.instructions[0].place == ("/user.py", 18)
    assert function.instructions[3].places == (("/user.py", 20),)


@pytest.mark.parametrize(
    ("text", "highest"),
    [
        ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24", 151),
        ("HGMMA.64x256x16.F16 R24, gdesc[UR12], R24", 87),
        ("HGMMA.64x8x16.F32 R4, R60, gdesc[UR12], R4", 63),
        ("IGMMA.64x32x32.S8.S8 R24, gdesc[UR4], RZ, !UPT, gsb0", 39),
        ("LDTM.x64 R4, tmem[UR4]", 67),
        ("LDTM.16dp256bit.x16 R4, tmem[UR4]", 67),
        ("STTM.x32 tmem[UR4], R10", 41),
        ("STG.E.128 desc[UR4][R2.64+0x10], R60", 63),
        ("LDSM.16.MT88.4 R8, [R3]", 11),
        ("IMAD.WIDE.U32 R2, R3, 0x4, R70", 70),
        ("IMAD.WIDE.U32 R70, R3, 0x4, R2", 71),
        ("FFMA R7, R5.reuse, UR4, RZ", 7),
        ("UMOV UR4, 0x400", -1),
    ],
)
def test_highest_register_of_an_instruction(text: str, highest: int) -> None:
    opcode, operands = text.split(" ", 1)
    assert sass.Instruction(0, "", opcode, operands, ()).highest_register == highest


def test_what_is_no_cubin() -> None:
    with pytest.raises(ToolchainError, match="could not read the cubin"):
        sass.disassemble(b"nonsense")


def test_a_disassembler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sass.ENVIRONMENT_VARIABLE, "/nowhere/nvdisasm")
    with pytest.raises(ToolchainError, match="/nowhere/nvdisasm could not be run"):
        sass.disassemble(b"")
    monkeypatch.setenv(sass.ENVIRONMENT_VARIABLE, "")
    monkeypatch.setattr(sass.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        sass.find_nvdisasm()
