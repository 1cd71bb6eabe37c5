"""Rewrites a traced forward so that what a model does in several steps over few rows is one kernel.

Two things are looked for, by what is computed and not by who does it: `silu(gate) * up` of projections that are one
product, and a product that is added to the residual stream and normed (RMS norm). Whatever else reads what lies between
keeps it from being rewritten.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from liveroll.model import operators  # noqa: F401  (defines what is called here by its name)

_GATED_PRODUCT = torch.ops.liveroll.gated_product.default
_NORMED_PRODUCT = torch.ops.liveroll.normed_product.default
_HALF = (torch.float16, torch.bfloat16)


def rewrite(graph: GraphModule, serves: Callable[[Tensor], bool] | None = None) -> int:
    """Rewrite a traced forward in place.

    Args:
        graph: as `torch.compile` hands it to its backend.
        serves: whether operators are there for products of such a tensor; by default, of half precision on a GPU, and
            not divided among ranks.

    Returns:
        How many places were rewritten.
    """
    taken = serves or _has_kernels
    found = 0
    for node in list(graph.graph.nodes):
        if _calls(node, operator.mul):
            found += _rewrite_gate(node, taken) or _rewrite_norm(node, taken)
    if found:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return found


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in _HALF and not isinstance(tensor, DTensor)


def _rewrite_gate(result: Node, taken: Callable[[Tensor], bool]) -> bool:
    """`silu(split(x W)[0]) * split(x W)[1]`."""
    activated, up = _nodes(result, 2)
    if not (_calls(activated, functional.silu) and _calls(up, operator.getitem) and up.args[1] == 1):
        return False
    (gate,) = _nodes(activated, 1)
    (parts,) = _nodes(up, 1)
    if not (_calls(gate, operator.getitem) and gate.args == (parts, 0) and _calls(parts, "split")):
        return False
    (product,) = _nodes(parts, 1)
    sizes = parts.args[1]
    if not (isinstance(sizes, list) and len(sizes) == 2 and sizes[0] == sizes[1] and parts.args[2:] == (-1,)):
        return False
    if not _is_product(product, taken):
        return False
    if not all(map(_used_once, (activated, up, gate, product))) or len(parts.users) != 2:
        return False
    with result.graph.inserting_before(result):
        new = result.graph.call_function(_GATED_PRODUCT, product.args[:2])
    new.meta = dict(result.meta)
    result.replace_all_uses_with(new)
    return True


def _rewrite_norm(result: Node, taken: Callable[[Tensor], bool]) -> bool:
    """`w * (s * rsqrt(mean(s ** 2) + e))` of `s = r + x W`."""
    scale, rounded = _nodes(result, 2)
    if scale is None or rounded is None or not _calls(rounded, "to") or not _is_parameter(scale):
        return False
    (scaled,) = _nodes(rounded, 1)
    if not _calls(scaled, operator.mul):
        return False
    wide, factor = _nodes(scaled, 2)
    (shifted,) = _nodes(factor, 1) if _calls(factor, torch.rsqrt) else (None,)
    if not _calls(shifted, operator.add) or not isinstance(epsilon := shifted.args[1], float):
        return False
    (mean,) = _nodes(shifted, 1)
    if not (_calls(mean, "mean") and mean.args[1:] == (-1,) and mean.kwargs == {"keepdim": True}):
        return False
    (square,) = _nodes(mean, 1)
    if not (_calls(square, "pow") and square.args == (wide, 2) and _calls(wide, "to")):
        return False
    (added,) = _nodes(wide, 1)
    if not _calls(added, operator.add):
        return False
    residual, product = _nodes(added, 2)
    if product is None or residual is None or not _is_product(product, taken) or not _used_once(product):
        return False
    dtype = _value(product).dtype
    if not all(_value(node).dtype == dtype for node in (scale, residual, added, rounded, result)):
        return False
    if _value(wide).dtype != torch.float32 or _value(residual).shape != _value(product).shape:
        return False
    if _value(scale).shape != _value(product).shape[-1:]:
        return False
    if not all(map(_used_once, (rounded, scaled, factor, shifted, mean, square))) or len(wide.users) != 2:
        return False
    graph = result.graph
    with graph.inserting_before(added):
        # What a parameter is read by may stand behind here, so the weights of the norm must be an input of the graph.
        both = graph.call_function(_NORMED_PRODUCT, (*product.args[:2], residual, scale, epsilon))
        sums, normed = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    sums.meta, normed.meta = dict(added.meta), dict(result.meta)
    added.replace_all_uses_with(sums)
    result.replace_all_uses_with(normed)
    return True


def _nodes(node: Node, count: int) -> tuple[Any, ...]:
    """The first arguments of a node, None for those that are no nodes."""
    return tuple(argument if isinstance(argument, Node) else None for argument in node.args[:count])


def _calls(node: Node | None, target: Any) -> bool:
    return node is not None and node.op in ("call_function", "call_method") and node.target == target


def _is_product(node: Node | None, taken: Callable[[Tensor], bool]) -> bool:
    """Whether a node is a product with a weight, without a bias, of a kind that operators are there for."""
    if node is None or not _calls(node, functional.linear) or node.kwargs:
        return False
    input, weight = _nodes(node, 2)
    return (
        node.args[2:] in ((), (None,))
        and _is_parameter(weight)
        and taken(_value(input))
        and taken(_value(weight))
        and _value(weight).dtype == _value(input).dtype == _value(node).dtype
        and _value(weight).is_contiguous()
        # Kernels find their way through a weight by 32 bits.
        and _value(weight).numel() < 2**31
    )


def _is_parameter(node: Node | None) -> bool:
    return node is not None and node.op in ("placeholder", "get_attr")


def _used_once(node: Node) -> bool:
    return len(node.users) == 1


def _value(node: Node) -> Tensor:
    """What a node gives, without its numbers."""
    value: Tensor = node.meta["example_value"]
    return value
