"""The monitor inside the Hugging Face Trainer and Lightning; both imported only when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvatlas.training.monitor import Monitor


def trainer_callback(monitor: Monitor) -> Any:
    """A ``transformers.TrainerCallback``: one ``monitor.step`` after each optimizer step."""
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise ImportError(
            "the Trainer callback needs transformers: pip install 'curvatlas[huggingface]'."
        ) from error

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given.get("optimizer")
        rates = [float(group["lr"]) for group in optimizer.param_groups] if optimizer else []
        monitor.step(step=int(state.global_step), learning_rate=max(rates) if rates else None)

    def on_train_end(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        monitor.close()

    kind = type(
        "CurvatureCallback", (base,), {"on_step_end": on_step_end, "on_train_end": on_train_end}
    )
    return kind()


def lightning_callback(monitor: Monitor) -> Any:
    """A Lightning ``Callback``: one ``monitor.step`` after each optimizer step."""
    base = None
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = importlib.import_module(name).Callback
            break
        except ImportError:
            continue
    if base is None:
        raise ImportError("the Lightning callback needs lightning: pip install lightning.")

    seen = [0]  # the last global step: a batch that only accumulates gradients does not move it

    def on_train_batch_end(self: Any, trainer: Any, *_: Any, **__: Any) -> None:
        if int(trainer.global_step) == seen[0]:
            return
        seen[0] = int(trainer.global_step)
        rates = [float(g["lr"]) for o in trainer.optimizers for g in o.param_groups]
        monitor.step(step=int(trainer.global_step), learning_rate=max(rates) if rates else None)

    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        monitor.close()

    kind = type(
        "CurvatureCallback",
        (base,),
        {"on_train_batch_end": on_train_batch_end, "on_train_end": on_train_end},
    )
    return kind()
