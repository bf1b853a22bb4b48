"""`mosaic-gpu demo`: attention of Llama 3's shape, on the GPU if there is one, else a cut of it in the simulator."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Annotated, Any

import numpy as np
import typer

from ..errors import MosaicGpuError, ToolchainError
from ..tune.workload import Attention
from .common import FAILED, AsJson, output, parse_json_option, print_json, refused_for, steps
from .compile import print_resources

LLAMA3 = Attention(2, 4096, 4096, 32, 8, 128, causal=True)  # 32 query heads, 8 KV heads of 128
CUT = dataclasses.replace(LLAMA3, batch=1, length=512, kv_length=512)  # what the simulator does in seconds


def demo(
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Of the random inputs; default: a new one each time.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Another shape, as b2s4096h32kv8d128.")] = None,
    config: Annotated[str | None, typer.Option(help="Another config, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run attention of a real model's shape, check it against float64, and show what it takes of the GPU.

    Exit code 1 if the error is above the tolerance: twice that of plain attention in float32 with P rounded to 16 bits.
    """
    fields = parse_json_option(config, "--config")
    with steps(5) as progress:
        progress.step("starting JAX")
        result = run_demo(progress.step, seed, shape, fields)
    if as_json:
        print_json(result)
    else:
        _print(result)
    if not result["right"]:
        raise typer.Exit(FAILED)


def run_demo(step: Any, seed: int | None, shape: str | None, fields: dict[str, Any] | None) -> dict[str, Any]:
    """The demo without its printing: where it ran, the error and what is allowed, the time, the resources."""
    import jax.numpy as jnp

    from mosaic_gpu.kernels import attention as dispatcher

    from ..runtime.device import default_arch, gpu_devices
    from ..tune.accuracy import Judge
    from ..tune.measure import AttentionBench, random_inputs
    from ..tune.space import config_from, generation_of

    arch = default_arch()
    on_gpu = arch is not None and arch.endswith("a")
    workload = LLAMA3 if on_gpu else CUT
    if shape is not None:
        with refused_for("--shape"):
            workload = Attention.parse(shape, causal=True)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    inputs = random_inputs(workload, seed)
    target = arch if on_gpu and arch is not None else "sm_90a"
    if fields is not None:
        with refused_for("--config"):
            config = config_from("attention", generation_of(target), fields)
    else:
        config = dispatcher.choose_config(*inputs[:3], True)
    call = functools.partial(dispatcher.attention, causal=True, config=config)

    out: Any
    seconds: float | None
    if on_gpu:
        step("compiling and timing on the GPU")
        bench = AttentionBench(workload, seed)
        measured = bench.measure(config)
        if measured.status == "refused":
            raise MosaicGpuError(measured.message)
        inputs, out, seconds = bench.sets[0], bench.output, measured.seconds
        allowed = bench.judge.allowed
    else:
        step("simulating, thread by thread")
        begun = time.perf_counter()
        out = call(*inputs)
        seconds = time.perf_counter() - begun
        allowed = Judge.of(*inputs, causal=workload.causal).allowed
    step("computing the reference in float64")
    heads = sorted({0, workload.heads // 3, workload.heads - 1}) if on_gpu else list(range(workload.heads))
    error = error_of(workload, inputs, out, heads)
    finite = bool(jnp.isfinite(out).all())
    step("compiling for the resource report")
    resources, why_not = _resources(workload, config, target)
    return {
        "where": str(gpu_devices()[0].device_kind) if on_gpu else "the simulator",
        "shape": str(workload),
        "workload": workload.to_json(),
        "config": config.to_json(),
        "seed": seed,
        "heads_checked": len(heads),
        "relative_error": error,
        "allowed_error": allowed,
        "right": finite and error <= allowed and (not on_gpu or measured.status == "ok"),
        "seconds": seconds,
        "tflops": workload.flops / seconds / 1e12 if on_gpu and seconds else None,
        "resources": resources,
        "no_resources": why_not,
    }


def error_of(workload: Attention, inputs: Any, out: Any, heads: list[int]) -> float:
    """The relative error of some heads of the first batch against float64."""
    from mosaic_gpu.kernels import reference

    own = np.array(heads)
    shared = own // (workload.heads // workload.kv_heads)
    q, k, v = (x[:1, :, i] for x, i in zip(inputs, (own, shared, shared), strict=True))
    right, _ = reference.attention(q, k, v, causal=workload.causal)
    return float(reference.relative_error(out[:1, :, own], right))


def _resources(workload: Attention, config: Any, arch: str) -> tuple[dict[str, Any] | None, str]:
    """What the kernel takes of the GPU, or why that cannot be said here."""
    from ..codegen.artifacts import resources_json
    from ..codegen.build import compile_plan
    from ..plan.build import build_plan
    from .targets import attention_call, program_of

    program = program_of(*attention_call(workload, arch, config), arch)
    plan = build_plan(program, arch)
    try:
        return resources_json(plan, compile_plan(plan)), ""
    except ToolchainError as error:
        return None, str(error)


def _print(result: dict[str, Any]) -> None:
    console = output()
    console.print(
        f"[bold]Attention of Llama 3's shape[/]: {result['shape']} ({LLAMA3.heads} query heads share {LLAMA3.kv_heads} KV "
        f"heads), bfloat16, causal, seed {result['seed']}"
        if result["workload"]["heads"] == LLAMA3.heads
        else f"[bold]Attention[/]: {result['shape']}, bfloat16, causal, seed {result['seed']}",
        highlight=False,
    )
    took = result["seconds"]
    speed = f", [bold]{result['tflops']:.0f} TFLOP/s[/]" if result["tflops"] else ""
    if took is None or not math.isfinite(took):
        when = "not timed"
    else:
        when = f"{took * 1e3:.3f} ms{speed}" if result["tflops"] else f"{took:.1f} s"
    console.print(f"ran on [bold]{result['where']}[/], {when}", highlight=False)
    verdict = "[green]right[/]" if result["right"] else "[bold red]WRONG[/]"
    console.print(
        f"relative error against float64 {result['relative_error']:.2e} over {result['heads_checked']} heads, "
        f"allowed {result['allowed_error']:.2e}: {verdict}",
        highlight=False,
    )
    if result["resources"] is not None:
        print_resources(console, result["resources"])
    else:
        console.print(f"no resource report: {result['no_resources']}", markup=False, highlight=False)
