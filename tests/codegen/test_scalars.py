"""Arrays of registers are written out as variables, and only where nothing else can be meant."""

from mosaic_gpu.codegen.scalars import scalars


def test_elements_become_variables():
    text = "float v1[2]; v1[0] = 1.f; v1[1] = v1[0] + w[1];\nsigned char v10[1]; v10[0] = 3;"
    assert scalars(text) == "float v1_0, v1_1; v1_0 = 1.f; v1_1 = v1_0 + w[1];\nsigned char v10_0; v10_0 = 3;"


def test_what_is_passed_on_or_indexed_by_a_variable_stays():
    text = (
        "float v3[2]; int v3_live = 0; v3[0] = 1.f; wgmma(v3, v4[0]);\n"
        "u32 v4[2]; v4[0] = 1; v4[1] = 2;\nint r5_x[2]; r5_x[i] = 3;\nint r6[1]; r6[0] = r5_x[0];"
    )
    assert scalars(text) == (
        "float v3[2]; int v3_live = 0; v3[0] = 1.f; wgmma(v3, v4_0);\n"
        "u32 v4_0, v4_1; v4_0 = 1; v4_1 = 2;\nint r5_x[2]; r5_x[i] = 3;\nint r6_0; r6_0 = r5_x[0];"
    )


def test_text_in_quotes_stays():
    text = 'int v1[1]; int v2[1]; print("v1[0] \\" v10[3]", v1[0]); v2[0] = 1;'
    assert scalars(text) == 'int v1[1]; int v2_0; print("v1[0] \\" v10[3]", v1[0]); v2_0 = 1;'


def test_other_names_are_no_arrays_of_registers():
    text = "int table[2]; table[1] = p0[3] + v;"
    assert scalars(text) == text


def test_nothing_declared():
    assert scalars("a[1] = b[2];") == "a[1] = b[2];"


def test_arrays_of_no_elements_are_not_declared():
    assert scalars("float v1[0]; int r2_x[0]; u32 v3[1]; v3[0] = 1;") == "; ; u32 v3_0; v3_0 = 1;"
    assert scalars("short v1[0];\ngiven(v1);").startswith(";\n")
