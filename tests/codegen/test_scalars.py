"""Arrays of registers are written out as variables, and only where nothing else can be meant."""

from mosaic_gpu.codegen.scalars import scalars


def test_elements_become_variables():
    text = "float v1[2]; v1[0] = 1.f; v1[1] = v1[0] + w[1];\nsigned char v10[1]; v10[0] = 3;"
    assert scalars(text) == "float v1_0, v1_1; v1_0 = 1.f; v1_1 = v1_0 + w[1];\nsigned char v10_0; v10_0 = 3;"


def test_what_is_passed_on_or_indexed_by_a_variable_stays():
    text = "float d[2]; int d_live = 0; d[0] = 1.f; wgmma(d, a[0]);\nu32 a[2]; a[0] = 1; a[1] = 2;\nint x[2]; x[i] = 3;"
    assert scalars(text) == (
        "float d[2]; int d_live = 0; d[0] = 1.f; wgmma(d, a_0);\nu32 a_0, a_1; a_0 = 1; a_1 = 2;\nint x[2]; x[i] = 3;"
    )


def test_nothing_declared():
    assert scalars("a[1] = b[2];") == "a[1] = b[2];"
