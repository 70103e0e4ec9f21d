"""AdamW with float32 master weights, while the model's parameters stay in bfloat16.

The engine can then read the parameters that are trained. With a learning rate of 1e-6 an update is far below bfloat16's
resolution, so without master weights most of it would be lost. A float32 parameter is its own master, and the result
equals torch.optim.AdamW bit for bit.

float16 has a narrow range: gradients of a mean over many tokens fall below 6e-8 and vanish. For float16 the loss is
multiplied by a power of two and the gradients divided by it (Micikevicius et al., arXiv 1710.03740).
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from alula.errors import require

LARGEST_SCALE, LOWER, PATIENCE = 2.0**16, 16.0, 50
"""An overflow divides the loss scale by `LOWER`; four of them reach 1. `PATIENCE` good steps in a row double it."""


class MasterAdamW:
    """AdamW over named parameters, plain or sharded (DTensor).

    Gradients of 16-bit parameters are moved into float32 sums as soon as autograd has finished with them. Micro-batches
    add up in float32, and a full set of 16-bit gradients never exists.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`compute` is the dtype of the gradients, which under FSDP differs from that of the parameters."""
        self.scale = torch.tensor([LARGEST_SCALE, 0.0]) if compute == torch.float16 else None
        """(loss scale, steps in a row without overflow); None if no scaling is needed."""
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        on_cuda = all(p.is_cuda for p in self.parameters.values())
        self.adamw = torch.optim.AdamW(
            self.masters.values(),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True if on_cuda else None,
        )
        self._halves = [(p, self.masters[name]) for name, p in self.parameters.items() if p is not self.masters[name]]
        for parameter, master in self._halves:
            _take_over(parameter, master)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's share of the loss."""
        self._check_not_replaced()
        (loss if self.scale is None else loss * float(self.scale[0])).backward()

    def step(self, lr: float, max_norm: float | None = None, finite_loss: bool = True) -> tuple[float, bool]:
        """Clip the summed gradients to `max_norm` over all parameters and ranks, and take one step.

        Returns the norm before clipping and whether the step was taken. If the norm or the loss is not finite,
        parameters, masters and moments stay unchanged. Gradients are cleared either way.
        """
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        if self.scale is not None and gradients:
            torch._foreach_mul_(gradients, 1 / float(self.scale[0]))
        norm = _full_norm(nn.utils.get_total_norm(gradients, foreach=True))
        taken = finite_loss and bool(torch.isfinite(norm))
        if taken:
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm, foreach=True)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.publish()
        self.adamw.zero_grad(set_to_none=True)
        if self.scale is not None and finite_loss:
            scale, served = self.scale.tolist()
            self.scale.copy_(_next_scale(scale, served, taken))
        return float(norm), taken

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the model's parameters in place, so that an engine on them sees the new values."""
        self._check_not_replaced()
        if self._halves:
            parameters, masters = zip(*self._halves)
            torch._foreach_copy_(list(parameters), list(masters))

    def _check_not_replaced(self) -> None:
        """Raise if a newer optimizer trains the same parameters: these masters would undo its steps."""
        for parameter, master in self._halves[:1]:
            require(
                _masters[parameter][0] is master,
                "a newer learner trains these parameters; use that one.",
            )

    def tensors(self) -> dict[str, Tensor]:
        """The state as flat, live tensors: `model.<name>` (masters), `optimizer.<name>.<moment>`, and for float16
        `optimizer.loss_scale`.

        To load a checkpoint, write into them and call `publish`.
        """
        self._materialise()
        state = {f"model.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for moment, value in self.adamw.state[master].items():
                state[f"optimizer.{name}.{moment}"] = value
        return state if self.scale is None else state | {"optimizer.loss_scale": self.scale}

    def _materialise(self) -> None:
        """Create AdamW's initial state now instead of at the first step."""
        fused = self.adamw.defaults["fused"]
        for master in self.masters.values():
            state = self.adamw.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)


def _next_scale(scale: float, served: float, taken: bool) -> Tensor:
    if not taken:
        return torch.tensor([max(1.0, scale / LOWER), 0.0])
    if served + 1 < PATIENCE:
        return torch.tensor([scale, served + 1])
    return torch.tensor([min(LARGEST_SCALE, 2 * scale), 0.0])


_masters = WeakTensorKeyDictionary()
"""Parameter -> (master that receives its gradients, hook that moves them)."""


def _take_over(parameter: Tensor, master: Tensor) -> None:
    """Send the parameter's gradients to this master from now on, instead of an earlier optimizer's."""
    if parameter in _masters:
        _masters[parameter][1].remove()
    hook = parameter.register_post_accumulate_grad_hook(lambda p: _move_gradient(p, master))
    _masters[parameter] = master, hook


def _move_gradient(parameter: Tensor, master: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def _full_norm(norm: Tensor) -> Tensor:
    """A norm over shards is a DTensor; its full value is the norm over all ranks."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
