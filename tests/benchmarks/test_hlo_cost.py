"""The HLO parser and cost model of the benchmarks."""

import pytest
from hlo_cost import instruction_costs
from hlo_program import read_program

# A scan of three steps. Its body has a fusion that slices a stack of weights, and an all-gather.
SCAN = """HloModule jit_f, entry_computation_layout={(f32[3,8,4]{2,1,0})->f32[8,4]{1,0}}

%fused (p0: f32[3,8,4], p1: s32[]) -> f32[8,4] {
  %p0 = f32[3,8,4]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,4]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %taken = f32[8,4]{1,0} bitcast(%slice)
}

%body (state: (s32[], f32[8,4], f32[3,8,4])) -> (s32[], f32[8,4], f32[3,8,4]) {
  %state = (s32[], f32[8,4]{1,0}, /*index=2*/f32[3,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %stack = f32[3,8,4]{2,1,0} get-tuple-element(%state), index=2
  %w = f32[8,4]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/while/body/squeeze"}
  %whole = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,2]<=[4], dimensions={1}, metadata={op_name="g"}
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %z = f32[8,4]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) tuple(%next, %z, %stack)
}

%condition (state.1: (s32[], f32[8,4], f32[3,8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (weights: f32[3,8,4]) -> f32[8,4] {
  %weights = f32[3,8,4]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %fast = f32[8,4]{1,0:T(8,128)S(1)} copy(%near)
  %near = f32[8,4]{1,0:T(8,128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) tuple(%start, %fast, %weights)
  %loop = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) while(%init), condition=%condition, body=%body, metadata={}
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_loop_body_counts_once_per_iteration():
    program = read_program(SCAN)
    assert program.entry == "main"
    assert program.times == {"main": 1, "body": 3, "condition": 3, "fused": 3}
    assert sum(cost.flops for cost in instruction_costs(program)) == 3 * (2 * 8 * 8 * 4 + 2 * 8 * 4 * 8)
    known = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    assert read_program(SCAN.replace(", metadata={}", known)).times["body"] == 7


def test_only_slices_and_arrays_in_main_memory_cause_traffic():
    costs = instruction_costs(read_program(SCAN))
    # Three iterations read 8 x 4 floats and an index, and write 8 x 4 floats.
    fusion = next(cost for cost in costs if cost.source == "jit(f)/while/body/squeeze")
    assert fusion.hbm_bytes == 3 * (8 * 4 * 4 + 4 + 8 * 4 * 4)
    assert [cost.hbm_bytes for cost in costs if not cost.flops and cost.times == 1] == [0, 0]


def convolved(left: str, right: str, output: str, attributes: str) -> float:
    """Returns the FLOPs of a program with one convolution."""
    text = f"""HloModule m

ENTRY %main (l: {left}, r: {right}) -> {output} {{
  %l = {left} parameter(0)
  %r = {right} parameter(1)
  ROOT %c = {output} convolution(%l, %r), {attributes}
}}
"""
    return sum(cost.flops for cost in instruction_costs(read_program(text)))


@pytest.mark.parametrize(
    ("left", "right", "output", "attributes", "flops"),
    [
        (  # [B, L, D] x [D, F].
            *("bf16[16,512,768]", "bf16[1,768,3072]", "bf16[16,512,3072]"),
            "window={size=1}, dim_labels=0bf_0io->0bf",
            2 * 16 * 512 * 768 * 3072,
        ),
        (  # [B, L, D] x [H, K, D]. The heads are a convolution window of 12, with 11 positions of padding.
            *("bf16[16,512,768,1]", "bf16[12,64,768,1]", "bf16[16,512,12,64]"),
            "window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            2 * 16 * 512 * 768 * 12 * 64,
        ),
        (  # Queries x keys, [B, L, H, K]. The window over rows and heads covers one element of a dilated input.
            *("bf16[16,512,12,64]", "bf16[16,512,12,64]", "bf16[16,12,512,512]"),
            "window={size=16x12 stride=15x11 lhs_dilate=16x12}, dim_labels=0b1f_0o1i->01bf",
            2 * 16 * 12 * 512 * 512 * 64,
        ),
        (  # A window of 4 with stride 2 over 8 elements and padding of 1: two of 4 outputs read one padding element.
            *("f32[1,8,1]", "f32[4,1,1]", "f32[1,4,1]"),
            "window={size=4 stride=2 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * (4 * 4 - 2),
        ),
    ],
)
def test_flops_of_convolutions_exclude_padding_and_dilation(left, right, output, attributes, flops):
    assert convolved(left, right, output, attributes) == flops


def test_cost_of_a_pallas_kernel_comes_from_the_cost_estimate():
    text = """HloModule m

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %k = f32[4,8]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config=CONFIG
}
""".replace(
        "CONFIG", '{"custom_call_config":{"cost_estimate":{"flops":1000,"transcendentals":0,"bytes_accessed":256}}}'
    )
    (cost,) = instruction_costs(read_program(text))
    assert (cost.flops, cost.hbm_bytes) == (1000, 256)
    (without_estimate,) = instruction_costs(read_program(text.replace("cost_estimate", "other")))
    assert (without_estimate.flops, without_estimate.hbm_bytes) == (0, 2 * 4 * 8 * 4)
