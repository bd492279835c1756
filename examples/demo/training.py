"""The training code that all demos use: optimisers, learning rates, averaged weights, and saved
states.

Muon (by Keller Jordan, with the constants of torch.optim.Muon) trains the matrices of the layers.
AdamW trains all other weights. torch's own Muon is not used, because it always orthogonalises in
bf16. On processors without bf16 kernels, bf16 is fifty times slower than fp32.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from dlm_export.network.denoiser import Denoiser
from dlm_export.network.linear import has_bf16_kernels

out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for tokenizer, config and weights.",
)


def rate_option(default: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--rate`` of a training command, with its default."""
    return click.option(
        "--rate",
        type=float,
        default=default,
        show_default=True,
        help="Peak learning rate of the matrices.",
    )


MOMENTUM, DECAY = 0.95, 0.02
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
AVERAGED_STEPS = 200  # approximate length of the moving average


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate the nearest matrix whose singular values are all equal.

    Uses five Newton-Schulz steps.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    if has_bf16_kernels(matrix.device):
        x = x.bfloat16()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """An optimiser for matrices, with momentum, orthogonalised steps and decoupled weight decay."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix by its orthogonalised momentum."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - MOMENTUM)
                step = orthogonal(parameter.grad.lerp(momentum, MOMENTUM))
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] * DECAY).add_(
                    step, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5
                )


def learning_rate(progress: float, step: int) -> float:
    """Return the current learning rate as a share of the peak learning rate.

    The rate rises during the first 50 steps, and is then constant until ``progress`` is 0.4. After
    that, it falls linearly, to zero when ``progress`` is 1.
    """
    return min(1.0, (step + 1) / 50) * min(1.0, max(0.0, (1 - progress) / 0.6))


@torch.no_grad()
def draw_layers(denoiser: Denoiser) -> None:
    """Set random matrices of the layers, and set norms to one.

    Matrices that write to the residual stream start at zero.
    """
    for name, parameter in denoiser.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name.endswith(("attention.out.weight", "mlp.down.weight")):
            parameter.zero_()
        elif name.startswith("blocks."):
            parameter.normal_(std=parameter.shape[0] ** -0.5)


@dataclass
class Training:
    """The state of a training run between two steps."""

    denoiser: Denoiser
    rate: float
    step: int = 0
    minutes: float = 0.0
    """Processor time spent so far. Time in which the process is stopped does not count."""
    averaged: dict[str, Tensor] = field(init=False)
    optimisers: list[tuple[torch.optim.Optimizer, float]] = field(init=False)

    def __post_init__(self) -> None:
        named = dict(self.denoiser.named_parameters())
        self.averaged = {name: parameter.detach().clone() for name, parameter in named.items()}
        matrices = [p for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2]
        others = [
            p for name, p in named.items() if not (name.startswith("blocks.") and p.ndim == 2)
        ]
        self.optimisers = [
            (Muon(matrices, self.rate), self.rate),
            (
                torch.optim.AdamW(others, lr=0.4 * self.rate, betas=(0.9, 0.98), weight_decay=0.0),
                0.4 * self.rate,
            ),
        ]

    def learn(self, loss: Tensor, progress: float) -> None:
        """Take one gradient step on ``loss``.

        ``progress`` goes from 0 to 1 during the run and sets the learning rate.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser, peak in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * learning_rate(progress, self.step)
            optimiser.step()
            optimiser.zero_grad()
        pace = 1 - min(1 - 1 / AVERAGED_STEPS, (self.step + 1) / (self.step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.averaged.values()), [p.detach() for p in self.denoiser.parameters()], pace
            )
        self.step += 1

    def save(self, path: Path) -> None:
        """Save the state for ``resume``. The file never contains only a part of the state."""
        state = {
            "step": self.step,
            "minutes": self.minutes,
            "parameters": self.denoiser.state_dict(),
            "averaged": self.averaged,
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
            "random": torch.get_rng_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a state that ``save`` wrote."""
        state = torch.load(path, weights_only=True)
        self.step, self.minutes, self.averaged = state["step"], state["minutes"], state["averaged"]
        self.denoiser.load_state_dict(state["parameters"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        torch.set_rng_state(state["random"])

    def run(
        self,
        losses: Iterable[Callable[[], Tensor]],
        steps: int,
        minutes: float | None,
        save_minutes: float,
        on_save: Callable[[], None],
    ) -> None:
        """Train for ``steps`` steps or ``minutes`` of processor time, or until SIGTERM.

        ``on_save`` is called every ``save_minutes`` and at the end. Each function in ``losses``
        computes the loss of one step.
        """
        is_stopped = threading.Event()
        before_handler = signal.signal(signal.SIGTERM, lambda number, frame: is_stopped.set())
        before = self.minutes - time.process_time() / 60
        saved = self.minutes
        recent: list[float] = []
        for loss_of in losses:
            self.minutes = before + time.process_time() / 60
            progress = max(self.step / steps, self.minutes / minutes if minutes else 0.0)
            if progress >= 1 or is_stopped.is_set():
                break
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=has_bf16_kernels(torch.device("cpu"))
            ):
                loss = loss_of()
            self.learn(loss, progress)
            recent.append(loss.item())
            if self.step % 50 == 0:
                click.echo(
                    f"minute {self.minutes:.1f} step {self.step} loss {sum(recent) / len(recent):.4f}",
                    err=True,
                )
                recent.clear()
            if self.minutes - saved > save_minutes:
                on_save()
                saved = self.minutes
        on_save()
        signal.signal(signal.SIGTERM, before_handler)
