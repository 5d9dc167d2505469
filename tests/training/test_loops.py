"""The monitor in other people's loops and loggers: what was logged is read back."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import forked
from curvatlas.training import MlflowTracker, TensorBoardTracker, WandbTracker
from half_precision import plain_half_precision

SMALL: dict[str, Any] = {
    "budget": 1.0, "eigenvalues": 1, "density_products": 2, "probes": 2, "max_products": 12,
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def plain_loop(tracker: Any) -> ca.Monitor:
    """Three steps with a tracker beside them; the last snapshot raises an event."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {**SMALL, "every": 1, "optimizer": optimizer, "trackers": [tracker]}
    with ca.Monitor(model, "cross_entropy", batch(), **options) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(batch()[0]), batch()[1]).backward()
            optimizer.step()
            monitor.step()
        optimizer.param_groups[0]["lr"] = 1e9
        monitor.step(step=20)
        monitor.step(step=21)
    return monitor


def expected(monitor: ca.Monitor) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(s.step, pytest.approx(getattr(s, name), rel=1e-5)) for s in monitor.snapshots]
        for name in ("sharpness", "edge", "edge_threshold", "trace")
    }


def test_tensorboard_holds_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = plain_loop(TensorBoardTracker(tmp_path))
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    for name, series in expected(monitor).items():
        assert [(e.step, e.value) for e in board.Scalars(f"curvature/{name}")] == series
    assert "curvature/events/text_summary" in board.Tags()["tensors"]


def test_mlflow_holds_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with pytest.raises(ValueError, match="no MLflow run is active"):
        MlflowTracker()
    with mlflow.start_run() as run:
        monitor = plain_loop(MlflowTracker())
    client = mlflow.MlflowClient()
    for name, series in expected(monitor).items():
        history = client.get_metric_history(run.info.run_id, f"curvature/{name}")
        assert sorted((m.step, m.value) for m in history) == series
    tags = client.get_run(run.info.run_id).data.tags
    assert any(key.startswith("curvature/events/20/") for key in tags)


def records(path: Path) -> Iterator[bytes]:
    """The payloads of a log of W&B's: blocks of 32 kB, each record with length and kind."""
    content, place, pending = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        pending += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield pending
            pending = b""


@pytest.mark.slow
def test_weights_and_biases_holds_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="curvature")
    monitor = plain_loop(WandbTracker(run))
    run.finish()
    (log,) = tmp_path.rglob("*.wandb")
    logged: dict[str, list[tuple[int, float]]] = {}
    for content in records(log):
        record = messages.Record()
        record.ParseFromString(content)
        row = {
            i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item
        }
        for key, value in row.items():
            logged.setdefault(key, []).append((record.history.step.num, value))
    for name, series in expected(monitor).items():
        assert logged[f"curvature/{name}"] == series


def test_accelerate_wraps_optimizer_and_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    monitor = ca.Monitor(model, "cross_entropy", batch(), every=1, optimizer=optimizer, **SMALL)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch()[0]), batch()[1]))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            monitor.step()
    assert [s.step for s in monitor.snapshots] == [0, 1]
    assert [s.metric for s in monitor.snapshots] == ["AdamW", "AdamW"]


def test_mixed_precision_is_measured_in_the_weights_own_precision() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    monitor = ca.Monitor(model, "cross_entropy", batch(), every=1, optimizer=optimizer, **SMALL)
    with plain_half_precision(), torch.autocast("cpu", dtype=torch.bfloat16):
        scaler.scale(F.cross_entropy(model(batch()[0]), batch()[1])).backward()
        scaler.step(optimizer)
        scaler.update()
        inside = monitor.step()
    outside = monitor.measure()
    assert inside is not None
    assert inside.sharpness == pytest.approx(outside.sharpness, rel=1e-4)
    assert inside.loss == pytest.approx(outside.loss, rel=1e-6)


def test_a_compiled_model_is_measured_by_its_own_weights() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="compile"):
        monitor = ca.Monitor(
            compiled, "cross_entropy", batch(), every=1, optimizer=optimizer, **SMALL
        )
    F.cross_entropy(compiled(batch()[0]), batch()[1]).backward()
    optimizer.step()
    snapshot = monitor.step()
    assert snapshot is not None
    plain = ca.Monitor(model, "cross_entropy", batch(), optimizer=optimizer, **SMALL).measure()
    assert snapshot.edge == pytest.approx(plain.edge, rel=1e-4)


@pytest.mark.huggingface
def test_only_the_adapters_of_a_lora_model_are_measured() -> None:
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 17, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    tokens = torch.randint(0, 17, (4, 6), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": tokens, "labels": tokens}
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    monitor = ca.Monitor(adapted, "cross_entropy", data, every=1, optimizer=optimizer, **SMALL)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(**data).loss.backward()
        optimizer.step()
        monitor.step()
    assert [s.metric for s in monitor.snapshots] == ["AdamW", "AdamW"]
    assert monitor._measuring.problem.size == sum(p.numel() for p in trainable)
    assert monitor.snapshots[-1].edge > 0


@pytest.mark.huggingface
@pytest.mark.slow
def test_the_trainer_gives_its_optimizer_and_counts_accumulated_steps_once(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = torch.randint(0, 17, (8, 6), generator=torch.Generator().manual_seed(0))
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=17, n_positions=8))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    monitor = ca.Monitor(
        model, "cross_entropy", {"input_ids": tokens, "labels": tokens}, every=1, **SMALL
    )
    callback = monitor.trainer_callback()
    Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[callback]).train()
    assert [s.step for s in monitor.snapshots] == [1, 2]
    assert monitor.snapshots[-1].metric == "AdamW"


@pytest.mark.huggingface
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_tells_of_a_bad_batch_at_its_own_step(accumulated: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    steps, bad, samples = 30, 28, 2 * accumulated
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 17, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.transformer.ln_f.weight.data.mul_(20)  # rather sure of the next token
    tokens = torch.randint(0, 17, (samples, 6)).repeat(steps, 1)
    with torch.no_grad():
        likely = model.eval()(input_ids=tokens).logits.argmax(2)
    likely[samples * (bad - 1) :][:samples] += 1
    # The first label has no prediction; the Trainer divides by all that are not ignored.
    labels = torch.cat([torch.full_like(tokens[:, :1], -100), likely[:, :-1] % 17], 1)
    data = {"input_ids": tokens, "labels": labels}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=accumulated, save_strategy="no", use_cpu=True,
        disable_tqdm=True, learning_rate=0.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    monitor = ca.Monitor(model, "cross_entropy", data, every=15, **SMALL)
    callback = monitor.trainer_callback()
    rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert [event.step for event in monitor.events if event.name == "bad_batch"] == [bad]
    with torch.no_grad():
        of_batch = [
            model.eval()(input_ids=t, labels=y).loss
            for t, y in zip(tokens.split(2), labels.split(2), strict=True)
        ]
    expected = torch.stack(of_batch).view(steps, accumulated).mean(1)
    told = dict(monitor._training)
    assert told == pytest.approx({k + 1: float(x) for k, x in enumerate(expected)}, rel=1e-4)
    assert not model._forward_hooks


def _ranks(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = (tensor[rank::world] for tensor in batch())
    options = {**SMALL, "budget": 0.3, "every": 1, "optimizer": optimizer}
    monitor = ca.Monitor(model, "cross_entropy", (x, y), **options)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        monitor.step()
    Path(folder, f"{rank}.json").write_text(
        json.dumps([(s.step, s.sharpness, s.edge) for s in monitor.snapshots])
    )
    torch.distributed.barrier()
    # Not by the end of the group: its destructor, which the wrapper's own reference puts off to the
    # return, holds the interpreter's lock and joins a thread of gloo that may wait for that lock.
    os._exit(0)


@pytest.mark.slow
def test_ranks_of_a_data_parallel_run_measure_together(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.ranks(_ranks, (2, port, str(tmp_path)))
    first, second = (json.loads((tmp_path / f"{k}.json").read_text()) for k in (0, 1))
    assert [step for step, _, _ in first] == [step for step, _, _ in second]
    for ours, theirs in zip(first, second, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
