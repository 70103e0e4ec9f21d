"""Fuses projections that read the same input into one matrix product: q, k, v and gate, up.

At decode batch sizes the launch of a small product costs more than its memory traffic. The weights move into one
buffer, and the modules' parameters become views of it, so a learner that shares the parameters reads and writes the
same memory under the same names. In compiled layers each module computes a slice of the joint product, and the compiler
pass `merge_equal_products` merges the equal products. The fused decoder computes the joint product itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JointSlice(nn.Linear):
    """Rows start .. stop of a product with `joint`. The module's weight is a view of `joint`."""

    joint: Tensor
    joint_bias: Tensor | None
    start: int
    stop: int

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.joint, self.joint_bias)[..., self.start : self.stop]


def fuse_projections(layer: nn.Module) -> None:
    """Fuse the projections of a decoder layer, in place."""
    for module in list(layer.modules()):
        for names in GROUPS:
            members = [getattr(module, name, None) for name in names]
            if all(type(m) is nn.Linear for m in members):
                _join(members)  # type: ignore[arg-type]


@torch.no_grad()
def _join(members: list[nn.Linear]) -> None:
    if len({m.bias is None for m in members}) > 1:
        return
    joint = _joined([m.weight for m in members])
    bias = None if members[0].bias is None else _joined([m.bias for m in members])
    start = 0
    for member in members:
        stop = start + member.out_features
        member.weight.data = joint[start:stop]
        if bias is not None:
            member.bias.data = bias[start:stop]
        member.__class__ = JointSlice
        member.register_buffer("joint", joint, persistent=False)
        member.register_buffer("joint_bias", bias, persistent=False)
        member.start, member.stop = start, stop  # type: ignore[assignment]
        start = stop


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor of all rows: the buffer they already are views of (another engine joined them), or a new one."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != end:
            return torch.cat(parts)
        end += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride()).detach()


class MergeEqualProducts(CustomGraphPass):
    """Common subexpression elimination: nodes with the same pure operator and the same inputs become one."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        seen: dict[Any, torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or node.kwargs or node.target not in PURE:
                continue
            key = (node.target, _frozen(node.args))
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node

    def uuid(self) -> str:
        return "alula-merge-equal-products-1"


aten = torch.ops.aten
PURE = {
    aten.mm.default,
    aten.addmm.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


merge_equal_products = MergeEqualProducts()
