"""Messages of ptxas, provoked for real: a kernel for each."""

from __future__ import annotations

import pytest

from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.prelude import generated, prelude
from mosaic_gpu.codegen.ptxas_log import PtxasLog, parse_log
from tests.wgmma_functions import wgmma_function

USER_FILE = "/home/someone/kernel.py"
FENCE, COMMIT, WAIT = "wgmma_fence();\n", "wgmma_commit();\n", "wgmma_wait<0>();\n"
PRODUCT, PRODUCT_RS = "ADD(d, a, b);\n", "ADD(d, x, x, x, x, b);\n"
FILL = "for (int i = 0; i < N / 2; i++) d[i] = 0;\n"


def compile_log(
    body: str,
    *,
    n: int = 64,
    bounds: str = "128, 1",
    in_registers: bool = False,
    before: str = "",
    options: tuple[str, ...] = (),
) -> PtxasLog:
    name, text = wgmma_function(n, "bf16", "bf16", "f32", in_registers, False, False, False)
    source = f"""{prelude("wgmma", "registers")}{generated(text)}
#line 1 "/before.cu"
constexpr int N = {n};
{before}
#line 1 "{USER_FILE}"
extern "C" __global__ void __launch_bounds__({bounds}) k(float* out, int count, u64 a, u64 b, u32 x) {{ float d[N / 2];
{body.replace("ADD(", name + "(")}
for (int i = 0; i < N / 2; i++) out[threadIdx.x * N / 2 + i] = d[i]; }}"""
    compiled = compile_cuda(source, arch="sm_90a", name="/k.cu", extra_options=options)
    return parse_log(compiled.log, compiled.ptx)


def loop(body: str) -> str:
    return f"for (int j = 0; j < count; j++) {{\n{body}}}\n"


INCREASE, DECREASE = "set_max_registers_increase<240>();\n", "set_max_registers_decrease<24>();\n"

# what provokes it: code (None where releases differ), kind, words of the explanation
PROVOKED = {
    "relocatable": (
        dict(body=INCREASE + FILL, options=("-rdc=true",)),
        "C7504",
        "setmaxnreg",
        "relocatable",
    ),
    "debugging": (dict(body=INCREASE + FILL, options=("-G",)), "C7505", "setmaxnreg", "debugging"),
    "budget too small": (
        dict(body=DECREASE + FILL + FENCE + PRODUCT + COMMIT + WAIT, bounds="384, 1"),
        "C7507",
        "setmaxnreg",
        "too small",
    ),
    "bounds without blocks": (dict(body=INCREASE + FILL, bounds="128"), "C7508", "setmaxnreg", "second argument"),
    "function call": (
        dict(
            body=FILL + FENCE + PRODUCT + COMMIT + 'printf("%d", count);\n' + WAIT,
            before='extern "C" __device__ int printf(const char*, ...);',
        ),
        "C7510",
        "serialized",
        "function call",
    ),
    "accumulator written in flight": (
        dict(body=FILL + loop(FENCE + PRODUCT + COMMIT + "d[3] = out[j];\n" + WAIT)),
        "C7511",
        "serialized",
        "would have to be copied",
    ),
    "too many threads": (
        dict(
            body="if (threadIdx.x < 128) { "
            + DECREASE
            + "} else { "
            + INCREASE
            + FILL
            + FENCE
            + PRODUCT
            + COMMIT
            + WAIT
            + "}",
            bounds="1024, 1",
        ),
        "C7512",
        "serialized",
        "too few registers",
    ),
    "A written in flight": (
        dict(body=FILL + loop(FENCE + PRODUCT_RS + COMMIT + "x = x * x + 1;\n" + WAIT), in_registers=True),
        "C7513",
        "serialized",
        "loop carry",
    ),
    "accumulator read on a path without a wait": (
        dict(body=FILL + FENCE + PRODUCT + COMMIT + "if (count > 3) {\n" + WAIT + "}\n"),
        "C7514",
        "serialized",
        "Wait on every path",
    ),
    "accumulator filled before a loop in flight": (
        dict(body=FILL + FENCE + loop(PRODUCT) + COMMIT + WAIT),
        "C7515",
        "serialized",
        "instead of filling",
    ),
    "no wait": (dict(body=FILL + FENCE + PRODUCT + COMMIT), "C7517", "injected", "put a wait"),
    "divergent wait": (
        dict(body=FILL + FENCE + PRODUCT + COMMIT + "if (out[threadIdx.x] > 3) {\n" + WAIT + "}\n"),
        "C7518",
        "serialized",
        "only some threads take",
    ),
    "divergent product": (
        dict(body=FILL + FENCE + "if (out[threadIdx.x] > 3) {\n" + PRODUCT + COMMIT + "}\n" + WAIT),
        None,
        "serialized",
        "Fence right before",
    ),
}


@pytest.mark.parametrize("case", PROVOKED)
def test_provoked(case: str) -> None:
    arguments, code, kind, words = PROVOKED[case]
    messages = [m for m in compile_log(**arguments).messages if words in m.explanation]  # type: ignore[arg-type]
    assert messages
    assert {message.kind for message in messages} == {kind}
    assert code is None or {message.code for message in messages} == {code}
    if kind != "setmaxnreg":
        assert {message.function for message in messages} == {"k"}
    assert all(message.text for message in messages)


def test_a_function_of_another_source() -> None:
    log = compile_log(
        FILL + FENCE + PRODUCT + COMMIT + WAIT + "elsewhere();\n",
        before='extern "C" __device__ void elsewhere();',
        options=("-rdc=true",),
    )
    assert [(m.code, m.kind) for m in log.messages] == [("C7509", "serialized")]


def test_a_good_kernel_has_no_messages() -> None:
    log = compile_log(FILL + FENCE + PRODUCT + COMMIT + WAIT)
    assert log.messages == () and log.warnings == ()


def test_messages_name_the_line_of_the_source() -> None:
    log = compile_log(FILL + FENCE + PRODUCT + COMMIT + "\n\nout[0] = d[3];\n" + WAIT)
    (message,) = (m for m in log.messages if m.code == "C7517")
    assert (message.file, message.line) == (USER_FILE, 8)
    assert str(message).startswith(f"{USER_FILE}:8: C7517: An accumulator is used")


def test_resources() -> None:
    log = compile_log(
        FILL + FENCE + PRODUCT + COMMIT + WAIT + "sh[threadIdx.x] = d[0]; __syncthreads(); helper(out + (int)sh[3]);",
        before="""__shared__ float sh[128];
__device__ __noinline__ void helper(float* p) {
  float local[100];
  for (int i = 0; i < 100; i++) local[i] = p[i * 3];
  p[threadIdx.x] = local[(int)p[5]];
}""",
    )
    kernel = log.entry("k")
    assert kernel == log.entry()
    assert 40 < (kernel.registers or 0) < 255
    assert kernel.shared == 512 and kernel.barriers == 1 and kernel.spill_stores == 0
    assert kernel.stack == 400
    (helper,) = (function for function in log.functions if not function.is_entry)
    assert helper.registers is None and "helper" in helper.name


def test_spills() -> None:
    body = "float e[200]; for (int i = 0; i < 200; i++) e[i] = out[i * 7];" + FILL + "__syncthreads();"
    body += FENCE + PRODUCT + COMMIT + WAIT + "for (int i = 0; i < 200; i++) out[i * 9] = e[i] * d[3];"
    usage = compile_log(body, bounds="512, 1").entry()
    assert usage.spill_stores > 0 and usage.spill_loads > 0


def test_warnings_of_the_language_are_kept() -> None:
    log = compile_log(FILL + "int unused = count;\nint zero = count / 0;\n")
    assert any("division by zero" in warning for warning in log.warnings)
    assert not any("unused" in warning for warning in log.warnings), "kernels compute more than they use"


def test_unknown_messages_are_kept_word_for_word() -> None:
    log = parse_log(
        "ptxas info    : (C7599) Something new about 'wgmma' in the function 'f' in line 12\n"
        "ptxas info    : (C7598) Potential Performance Loss: wgmma.mma_async instructions are serialized due to magic\n"
        "ptxas warning : Unresolved thing\n"
    )
    assert [(m.code, m.kind, m.explanation, m.function) for m in log.messages] == [
        ("C7599", "other", "", "f"),
        ("C7598", "serialized", "", ""),
        ("", "other", "", ""),
    ]
    assert "Something new about 'wgmma'" in str(log.messages[0])


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        # CUDA 12 and 13.0, where CUDA 13.5 has C7519 for what they call C7520
        (
            "(C7519) warpgroup.arrive is injected in around line 70 by compiler to allow use of registers in GMMA in "
            "function 'k'",
            "injected",
            "no fence",
        ),
        (
            "(C7517) warpgroup.wait is injected in around line 87 by compiler to allow use of registers defined by "
            "GMMA in function 'k'",
            "injected",
            "put a wait",
        ),
        (
            "(C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence "
            "on compiler-inserted WG.AR in divergent path in the function 'k'",
            "serialized",
            "Fence right before",
        ),
    ],
)
def test_messages_of_other_releases(line: str, kind: str, words: str) -> None:
    (message,) = parse_log(f"ptxas info    : {line}").messages
    assert message.kind == kind and words in message.explanation and message.function == "k"


def test_asking_for_a_kernel_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="asked for other"):
        compile_log(FILL).entry("other")
