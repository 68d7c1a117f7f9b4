"""Graphs as data: nodes are read as they are, arguments are only copied, names find their library, DOT is valid."""

from __future__ import annotations

import ctypes
import io
import re
import struct

import pytest
import torch
from null.driver_double import BASE, Captured, DriverDouble, Kernel, NodeData, add_floats, int32, pointer
from rich.console import Console

from bucketgraph.cuda import DriverError, Graph, inspect
from bucketgraph.cuda.driver import KernelParams
from bucketgraph.cuda.memory import Region, Regions
from bucketgraph.cuda.names import PATTERNS, demangle, library, own_kernels, short
from bucketgraph.cuda.nodes import Dependency, KernelNode, MemcpyNode, MemsetNode, Parameter
from bucketgraph.errors import CaptureError

ATEN = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"


def graph_of(driver: DriverDouble, handle: int) -> Graph:
    return Graph.of(Captured(driver, handle), driver)  # type: ignore[arg-type]


def mixed(driver: DriverDouble) -> int:
    """A kernel, a copy, a fill and a host node."""
    add = driver.load(Kernel("_add", (8, 8, 8, 4), add_floats))
    graph = driver.graph()
    driver.kernel(graph, add, [pointer(BASE), pointer(BASE + 64), pointer(BASE + 128), int32(4)])
    driver.memcpy(graph, BASE + 128, BASE + 256, 16)
    driver.memset(graph, BASE + 512, 32)
    driver.add(graph, NodeData("host"), programmatic=True)
    return graph


def test_nodes_are_read_with_their_bytes_and_dependencies() -> None:
    driver = DriverDouble()
    graph = graph_of(driver, mixed(driver))
    kernel, copy, fill, host = graph.nodes
    assert isinstance(kernel, KernelNode) and isinstance(copy, MemcpyNode) and isinstance(fill, MemsetNode)
    assert kernel.symbol == "_add" and kernel.params.grid == (4, 1, 1)
    assert kernel.parameters == (Parameter(0, 8), Parameter(8, 8), Parameter(16, 8), Parameter(24, 4))
    assert kernel.block == struct.pack("<QQQi", BASE, BASE + 64, BASE + 128, 4)
    assert copy.block == struct.pack("<QQ", BASE + 128, BASE + 256) and copy.size == 16
    assert fill.block == struct.pack("<Q", BASE + 512) and fill.size == 32
    assert [node.after for node in graph.nodes] == [
        (),
        (Dependency(0),),
        (Dependency(1),),
        (Dependency(2, programmatic=True),),
    ]
    assert host.kind == "host" and host.block == b""
    assert driver.untouched(graph.handle)


def test_gaps_between_parameters_are_zero() -> None:
    driver = DriverDouble()
    graph = driver.graph()
    driver.kernel(graph, driver.load(Kernel("_k", (4, 8, 1, 2))), [int32(-1), pointer(BASE), b"\xff", b"\xee\xdd"])
    (node,) = graph_of(driver, graph).nodes
    assert node.block == b"\xff" * 4 + bytes(4) + pointer(BASE) + b"\xff\x00\xee\xdd"
    assert node.parameter_at(0) is None and node.parameter_at(8) == 1


def test_a_kernel_handle_serves_where_there_is_no_function() -> None:
    driver = DriverDouble()
    graph = driver.graph()
    driver.kernel(graph, driver.load(Kernel("_k", (8,))), [pointer(BASE)], as_kernel=True)
    (node,) = graph_of(driver, graph).nodes
    assert isinstance(node, KernelNode) and node.symbol == "_k" and node.params.function == 0


def test_packed_arguments_are_read_but_not_patched() -> None:
    driver = DriverDouble()
    graph = driver.graph()
    kernel = driver.load(Kernel("_k", (8, 4)))
    packed = ctypes.create_string_buffer(struct.pack("<Qi", BASE, 7), 12)
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    params = KernelParams(kernel, 0, 0, (1, 1, 1), (1, 1, 1), 0, 0, ctypes.addressof(extra))
    driver.add(graph, NodeData("kernel", params, kept=(packed, size, extra)))
    (node,) = graph_of(driver, graph).nodes
    assert node.block == struct.pack("<Qi", BASE, 7)
    assert node.why_fixed == "its arguments are one packed buffer"


def test_a_kernel_without_parameters_or_name_is_a_node_all_the_same() -> None:
    driver = DriverDouble()
    graph = driver.graph()
    driver.kernel(graph, driver.load(Kernel("", ())), [])
    (node,) = graph_of(driver, graph).nodes
    assert node.block == b"" and node.label == "unnamed_kernel" and node.library == "other"


def test_a_graph_that_was_not_kept_says_how_to_keep_it() -> None:
    driver = DriverDouble()
    with pytest.raises(CaptureError, match="keep_graph=True"):
        Graph.of(Captured(driver, driver.graph(), kept=False), driver)  # type: ignore[arg-type]


def test_an_executable_needs_instantiate() -> None:
    driver = DriverDouble()
    captured = Captured(driver, driver.graph())
    graph = Graph.of(captured, driver)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="instantiate"):
        graph.executable()
    captured.instantiate()
    assert graph.executable() in driver.executables
    with pytest.raises(CaptureError, match="has no executable"):
        Graph(graph.handle, driver).executable()


def test_a_graph_that_is_gone_is_a_driver_error() -> None:
    with pytest.raises(DriverError, match=r"cuGraphGetNodes failed: given CUDA_ERROR_INVALID_HANDLE \(400\)"):
        Graph(1, DriverDouble())


# -- which tensor an address belongs to ------------------------------------------------------------------------------


def test_a_region_spans_a_view_and_no_more() -> None:
    base = torch.zeros(10, 4)
    assert Region.of("x", base).size == 160
    view = base[2:5, 1:3]
    assert Region.of("x", view) == Region("x", base.data_ptr() + 36, 2 * 16 + 8)
    assert Region.of("x", base[:0]).size == 0


def test_pointers_name_the_tensor_and_the_byte() -> None:
    driver = DriverDouble()
    kernel, copy, fill, _ = graph_of(driver, mixed(driver)).nodes
    regions = Regions([Region("x", BASE, 64), Region("out", BASE + 100, 200), Region("empty", BASE, 0)])
    assert [(p.offset, p.parameter, p.tensor, p.inside) for p in regions.pointers(kernel)] == [
        (0, 0, "x", 0),
        (16, 2, "out", 28),
    ]
    assert [(p.parameter, p.tensor, p.inside) for p in regions.pointers(copy)] == [(0, "out", 28), (1, "out", 156)]
    assert regions.pointers(fill) == ()
    assert regions.find(BASE + 64) is None


def test_the_innermost_of_nested_tensors_is_found() -> None:
    regions = Regions([Region("arena", BASE, 1000), Region("x", BASE + 100, 50)])
    assert (found := regions.find(BASE + 120)) is not None and found.name == "x"
    assert (found := regions.find(BASE + 200)) is not None and found.name == "arena"


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("nvjet_tst_128x64_64x6_2x1_v_bz_TNT", "cuBLAS"),
        ("nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_NNT", "cuBLAS"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "cuBLAS"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4", "cuBLAS"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4>(...)", "cuBLAS"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "cuBLAS"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4>(float)", "cuBLAS"),
        ("void cutlass::device_kernel<mine::Gemm>(mine::Gemm::Params)", "CUTLASS"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(int)", "FlashAttention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", "FlashAttention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128", "cuDNN"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "cuDNN"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", "ATen"),
        ("void at_cuda_detail::cub::DeviceRadixSortKernel<int>(int)", "ATen"),
        ("void cub::DeviceReduceKernel<int>(int)", "CUB"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "NCCL"),
        ("triton_poi_fused_add_relu_0", "Triton"),
        (ATEN, "ATen"),
        ("my_kernel", "other"),
    ],
)
def test_library_by_name(name: str, owner: str) -> None:
    assert library(name) == owner


def test_every_pattern_compiles_and_has_a_source() -> None:
    assert all(re.compile(pattern) and source for _, pattern, source in PATTERNS)


def test_own_kernels_are_found_by_their_function_names() -> None:
    assert "_rms_norm" in own_kernels()
    assert library("_rms_norm", (8, 8, 8, 8)) == "bucketgraph"
    assert library("_rms_norm_0d1d2de", (8, 8, 8, 8)) == "bucketgraph"


def test_a_plain_name_with_two_scratch_pointers_is_tritons() -> None:
    assert library("some_kernel", (8, 4, 8, 8)) == "Triton"
    assert library("some_kernel", (8, 8, 4)) == "other"
    assert library("_Z3fooPfS_", (8, 8)) == "other"


def test_names_are_demangled_and_shortened() -> None:
    assert demangle("plain") == "plain" and demangle("_Znonsense") == "_Znonsense"
    assert demangle(ATEN).startswith("void at::native::vectorized_elementwise_kernel<4, ")
    assert short(demangle(ATEN)) == "at::native::vectorized_elementwise_kernel"
    assert short("void f::(anonymous namespace)::g<h<(int)3>, 2>(int, float*)") == "f::{anonymous}::g"
    assert short("plain") == "plain"


# -- drawings --------------------------------------------------------------------------------------------------------


def test_groups_count_nodes_of_one_kernel() -> None:
    driver = DriverDouble()
    graph = driver.graph()
    x = torch.zeros(8)
    kernel = driver.load(Kernel("_rms_norm", (8,)))
    for block in range(3):
        driver.kernel(graph, kernel, [pointer(x.data_ptr() + 4 * block)], grid=(2 + block, 1, 1))
    driver.memset(graph, BASE, 64)
    found = inspect.groups(graph_of(driver, graph), {"x": x})
    assert [(group.library, group.label, len(group.nodes), group.tensors) for group in found] == [
        ("bucketgraph", "_rms_norm", 3, ("x",)),
        ("memset", "memset", 1, ()),
    ]
    assert found[0].parameter_bytes == (8,)
    assert inspect.by_library(found) == {"bucketgraph": 3, "memset": 1}
    out = io.StringIO()
    Console(file=out, width=160).print(inspect.table(found, "minilm batch=[4]"))
    assert "minilm batch=[4]: 4 nodes" in out.getvalue() and "2, 3, 4" in out.getvalue()


def statements(text: str) -> tuple[dict[str, dict[str, str]], list[tuple[str, str, str]]]:
    """Nodes and edges of a DOT file, by a parser that takes nothing but what Graphviz's grammar allows."""
    string = r'"(?:[^"\\\n]|\\.)*"'
    head, *body, tail = text.splitlines()
    assert re.fullmatch(rf"digraph {string} \{{", head) and tail == "}"
    nodes: dict[str, dict[str, str]] = {}
    edges = []
    for line in body:
        value = rf"(?:{string}|[A-Za-z_][A-Za-z0-9_]*)"
        if edge := re.fullmatch(r"  (n\d+) -> (n\d+)( \[style=dashed\])?;", line):
            edges.append((edge[1], edge[2], edge[3] or ""))
            continue
        node = re.fullmatch(rf"  (\w+) \[((?:\w+={value}(?:, )?)+)\];", line)
        assert node is not None, line
        nodes[node[1]] = dict(re.findall(rf"(\w+)=({value})", node[2]))
    return nodes, edges


def test_dot_is_valid_and_escapes_names() -> None:
    driver = DriverDouble()
    graph = mixed(driver)
    evil = driver.load(Kernel('a"b\\n"]; n9 -> n9 [x\n', (8,)))
    driver.kernel(graph, evil, [pointer(BASE)], programmatic=True)
    nodes, edges = statements(inspect.dot(graph_of(driver, graph), 'set "x"\\'))
    assert list(nodes) == ["node", "n0", "n1", "n2", "n3", "n4"]
    assert edges == [
        ("n0", "n1", ""),
        ("n1", "n2", ""),
        ("n2", "n3", " [style=dashed]"),
        ("n3", "n4", " [style=dashed]"),
    ]
