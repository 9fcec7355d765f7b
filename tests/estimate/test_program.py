"""A compiled program's text: what is read from it, and how often each part of it is carried out."""

import pytest

from bertjax.estimate.collectives import collectives
from bertjax.estimate.cost import work_of
from bertjax.estimate.program import read_program

# As XLA writes it: a scan of three steps, in whose body is a fusion that takes the slice of a stack, and a gather.
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


def test_a_loop_counts_as_often_as_it_runs():
    program = read_program(SCAN)
    assert program.entry == "main"
    assert {name: program.times[name] for name in program.computations} == {
        "main": 1,
        "body": 3,
        "condition": 3,
        "fused": 3,
    }
    assert sum(work.flops for work in work_of(program)) == 3 * (2 * 8 * 8 * 4 + 2 * 8 * 4 * 8)


def test_the_compilers_own_count_of_a_loop_is_taken_where_it_says_one():
    known = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    text = SCAN.replace(", metadata={}", known)
    assert read_program(text).times["body"] == 7


def test_a_slice_of_a_stack_is_read_and_not_the_stack():
    fusion = next(work for work in work_of(read_program(SCAN)) if work.source == "jit(f)/while/body/squeeze")
    # A layer's 8 x 4 floats and the index, read, and as many written.
    assert fusion.hbm_bytes == 3 * (8 * 4 * 4 + 4 + 8 * 4 * 4)


def test_what_lies_nearer_than_main_memory_is_no_traffic():
    program = read_program(SCAN)
    near = [work.hbm_bytes for work in work_of(program) if not work.flops and work.times == 1]
    assert near == [0, 0]


def test_a_program_is_wanted():
    with pytest.raises(ValueError, match="no program"):
        read_program("HloModule nothing\n")


def exchange(line: str, devices: int):
    """The one collective of a program with that line."""
    text = f"""HloModule m

ENTRY %main (p: f32[4,8]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  ROOT %{line}
}}
"""
    (found,) = collectives(read_program(text), devices)
    return found


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
    ],
)
def test_groups_are_read_in_each_of_their_forms(groups, expected):
    found = exchange(f"r = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}", 4)
    assert found.groups.tolist() == expected
    size = len(expected[0])
    assert found.moved_bytes == pytest.approx(2 * (size - 1) / size * 4 * 8 * 4)
    assert not found.crosses_slices


def test_each_kind_moves_what_a_ring_moves():
    gather = exchange("g = f32[4,32]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={1}", 4)
    assert (gather.kind, gather.moved_bytes) == ("all-gather", 3 / 4 * 4 * 32 * 4)
    start = exchange(
        "g = (f32[4,8]{1,0}, f32[4,32]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4]", 4
    )
    assert (start.kind, start.moved_bytes) == ("all-gather", 3 / 4 * 4 * 32 * 4)
    scatter = exchange("s = f32[4,2]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4]", 4)
    assert (scatter.kind, scatter.moved_bytes) == ("reduce-scatter", 3 / 4 * 4 * 8 * 4)
    permute = exchange(
        "p = f32[4,8]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 4
    )
    assert (permute.moved_bytes, permute.groups.tolist()) == (4 * 8 * 4, [[0, 1], [1, 2], [2, 3], [3, 0]])


def test_what_is_handed_to_the_hosts_crosses_slices():
    # As the TPU compiler writes a sum over four slices, of which each device has done its slice's part.
    text = """HloModule m

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %token = token[] after-all()
  %send = (f32[4,8]{1,0}, u32[], token[]) send(%p, %token), channel_id=5, frontend_attributes={TYPE}
  %recv = (f32[4,8]{1,0}, u32[], token[]) recv(%token), channel_id=4, frontend_attributes={TYPE}
  %done = (f32[4,8]{1,0}, token[]) recv-done(%recv), channel_id=4
  ROOT %r = f32[4,8]{1,0} get-tuple-element(%done), index=0
}
"""
    named = '_xla_megascale_target="{1:3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"'
    (found,) = collectives(read_program(text.replace("TYPE", named)), devices=4, slices=4)
    assert (found.kind, found.crosses_slices, found.moved_bytes) == ("all-reduce", True, 2 * 3 / 4 * 4 * 8 * 4)


def test_a_collective_that_is_written_in_parts_counts_once():
    text = """HloModule m

%part.1 (p.1: f32[4,8]) -> f32[4,32] {
  %p.1 = f32[4,8]{1,0} parameter(0)
  ROOT %g.1 = f32[4,32]{1,0} all-gather(%p.1), channel_id=5, replica_groups=[1,4]<=[4], dimensions={1}
}

%part.2 (p.2: f32[4,8]) -> f32[4,32] {
  %p.2 = f32[4,8]{1,0} parameter(0)
  ROOT %g.2 = f32[4,32]{1,0:S(1)} all-gather(%p.2), channel_id=5, replica_groups=[1,4]<=[4], dimensions={1}
}

%all-reduce-scatter.3 (p.3: f32[4,32]) -> f32[4,8] {
  %p.3 = f32[4,32]{1,0} parameter(0)
  %sum = f32[4,32]{1,0} all-reduce(%p.3), channel_id=6, replica_groups=[1,4]<=[4]
  %zero = s32[] constant(0)
  ROOT %slice = f32[4,8]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={4,8}
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %a = f32[4,32]{1,0} fusion(%p), kind=kCustom, calls=%part.1
  %b = f32[4,32]{1,0} fusion(%p), kind=kCustom, calls=%part.2
  ROOT %c = f32[4,8]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    found = collectives(read_program(text), 4)
    assert sorted((one.kind, one.times, one.moved_bytes) for one in found) == [
        ("all-gather", 1, 3 / 4 * 4 * 32 * 4),
        ("reduce-scatter", 1, 3 / 4 * 4 * 32 * 4),
    ]


def convolved(left: str, right: str, output: str, attributes: str) -> float:
    """FLOPs of one convolution."""
    text = f"""HloModule m

ENTRY %main (l: {left}, r: {right}) -> {output} {{
  %l = {left} parameter(0)
  %r = {right} parameter(1)
  ROOT %c = {output} convolution(%l, %r), {attributes}
}}
"""
    return sum(work.flops for work in work_of(read_program(text)))


def test_matrix_products_that_the_tpu_compiler_writes_as_convolutions():
    # [B, L, D] x [D, F].
    flops = convolved(
        "bf16[16,512,768]", "bf16[1,768,3072]", "bf16[16,512,3072]", "window={size=1}, dim_labels=0bf_0io->0bf"
    )
    assert flops == 2 * 16 * 512 * 768 * 3072
    # [B, L, D] x [H, K, D] to [B, L, H, K]: the heads are positions of a window that lies on padding but for one.
    flops = convolved(
        *("bf16[16,512,768,1]", "bf16[12,64,768,1]", "bf16[16,512,12,64]"),
        "window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
    )
    assert flops == 2 * 16 * 512 * 768 * 12 * 64
    # Queries x keys, [B, L, H, K] both, of each row and head: both are positions of a window on a stretched input.
    flops = convolved(
        *("bf16[16,512,12,64]", "bf16[16,512,12,64]", "bf16[16,12,512,512]"),
        "window={size=16x12 stride=15x11 lhs_dilate=16x12}, dim_labels=0b1f_0o1i->01bf",
    )
    assert flops == 2 * 16 * 12 * 512 * 512 * 64
    # A window of 4 with a stride of 2 on 8 elements, one of padding at each end: 4 outputs, of which two lack one.
    flops = convolved(
        "f32[1,8,1]", "f32[4,1,1]", "f32[1,4,1]", "window={size=4 stride=2 pad=1_1}, dim_labels=b0f_0io->b0f"
    )
    assert flops == 2 * (4 * 4 - 2)


def test_a_kernels_own_estimate_is_all_that_is_known_of_it():
    text = """HloModule m

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %k = f32[4,8]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config=CONFIG
}
""".replace(
        "CONFIG", '{"custom_call_config":{"cost_estimate":{"flops":1000,"transcendentals":0,"bytes_accessed":256}}}'
    )
    (work,) = work_of(read_program(text))
    assert (work.flops, work.hbm_bytes) == (1000, 256)
    (silent,) = work_of(read_program(text.replace("cost_estimate", "other")))
    assert (silent.flops, silent.hbm_bytes) == (0, 2 * 4 * 8 * 4)
