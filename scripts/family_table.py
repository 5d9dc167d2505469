"""Second derivatives by the tape against plain double backward, for every Hugging Face family.

    python scripts/family_table.py              every family  → docs/families.json and the page
    python scripts/family_table.py bert gpt2    these only, printed
    python scripts/family_table.py --page       the page again, from what was kept

A family counts where its tiny random model can be built and called here with made-up text, images
or sound. H v, H_o v and H_f v of one random direction are compared in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import json
import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
PAGE, KEPT = ROOT / "docs" / "families.md", ROOT / "docs" / "families.json"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.utils import ModelOutput  # noqa: E402

from curvatlas.errors import DifferentiationError, NoGradientPath  # noqa: E402
from curvatlas.problem.evaluation import evaluation  # noqa: E402
from curvatlas.tape.record import Record, record  # noqa: E402
from curvatlas.tape.run import Tape  # noqa: E402
from huggingface_models import tiny_model  # noqa: E402
from page_table import table  # noqa: E402

SECONDS, MEMORY = 25, 6 * 2**30
Call = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """What became of a family: ``verdict`` is exact, refused, wrong, broken or absent."""

    family: str
    verdict: str
    model: str = ""
    inputs: str = ""
    why: str = ""
    errors: tuple[float, ...] = ()  # of H v, H_o v, H_f v and the gradient, relative
    single: bool = False  # the family rounds to float32 inside
    operations: int = 0
    by_autograd: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    seconds: float = 0.0


# Sizes that some families need beside the usual ones, tried in turn.
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 4}
_STATES = {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {**_LATENT, "qk_rope_head_dim": 4, "qk_head_dim": 8, "head_dim": 4},
    {**_LATENT, "qk_rope_head_dim": 4, "qk_head_dim": 8, "head_dim": 8},
    {**_STATES, "mamba_n_heads": 8, "mamba_d_head": 4},
    {**_STATES, "n_mamba_heads": 8, "mamba_headdim": 4, "mamba_ngroups": 1},
    {**_STATES, "num_heads": 8, "head_dim": 4, "n_groups": 1, "expand": 2},
    {"prediction_length": 4, "context_length": 8},
    {"num_groups": 4, "groups": 1, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    {"num_key_value_heads": 4},
    {"hidden_size": 32, "head_dim": 8},
)


# --- inputs ---------------------------------------------------------------------------------------


def calls(model: nn.Module) -> Iterator[Call]:
    """Keyword arguments that a family's model may take: text, images, sound, series."""
    config: Any = model.config
    draw = torch.Generator().manual_seed(1)

    def tokens(length: int = 7) -> Tensor:
        return torch.randint(3, 19, (2, length), generator=draw)

    def floats(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=draw, dtype=torch.float64)

    text = {"input_ids": tokens()}
    yield text
    yield {**text, "decoder_input_ids": tokens(5)}
    yield {**text, "bbox": torch.randint(0, 19, (2, 7, 4), generator=draw)}
    yield {**text, "bbox": torch.rand(2, 7, 8, generator=draw, dtype=torch.float64)}
    images = []
    for size in dict.fromkeys((*_sizes(config), 8, 32, 64, 224)):
        high, wide = size if isinstance(size, (tuple, list)) else (size, size)
        images += [{"pixel_values": floats(channels, high, wide)} for channels in (3, 1)]
    yield from images
    for image in images:
        yield {**text, **image}
        yield {**text, **image, "decoder_input_ids": tokens(5)}
        yield {**image, "decoder_input_ids": tokens(5)}
    mels = _named(config, "num_mel_bins", "input_feat_per_channel", "num_features") or 80
    frames = 2 * (_named(config, "max_source_positions") or 16)
    sounds = [
        {"input_features": floats(mels, frames)},
        {"input_features": floats(frames, mels)},
        {"input_features": floats(100, mels)},
        {"input_values": floats(2000)},
        {"input_values": floats(1, 2000)},
        {"input_values": floats(_named(config, "max_length") or 100, mels)},
        {"input_values": floats(mels, 100)},
    ]
    for sound in sounds:
        yield sound
        yield {**sound, "decoder_input_ids": tokens(5)}
        yield {**text, **sound}
    length = _named(config, "context_length", "prediction_length") or 16
    channels = _named(config, "num_input_channels", "input_size") or 1
    yield {"past_values": floats(length, channels)}
    yield {"past_values": floats(length)}
    lags = max(getattr(config, "lags_sequence", None) or [0])
    past, features = length + lags, getattr(config, "num_time_features", 0)
    series = {
        "past_values": floats(past),
        "past_time_features": floats(past, features),
        "past_observed_mask": torch.ones(2, past),
    }
    yield series
    ahead = _named(config, "prediction_length") or length
    yield {
        **series,
        "future_values": floats(ahead),
        "future_time_features": floats(ahead, features),
    }
    yield {"inputs_embeds": floats(7, 16)}
    yield {"inputs": tokens(32)}


def _named(config: Any, *names: str) -> int | None:
    parts = (config, *(c for c in vars(config).values() if hasattr(c, "model_type")))
    found = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in found if isinstance(value, int)), None)


def _sizes(config: Any) -> list[Any]:
    parts = (config, *(c for c in vars(config).values() if hasattr(c, "model_type")))
    return [s for part in parts if (s := getattr(part, "image_size", None))]


def read(output: Any) -> Tensor:
    """The tensor that the loss is of: the logits, or the first that can be differentiated."""
    named = dict(output) if isinstance(output, ModelOutput) else {}
    leaves = [named[n] for n in ("logits", "prediction_logits", "last_hidden_state") if n in named]
    leaves += torch.utils._pytree.tree_leaves(output)
    return next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.ndim)


def loss(outputs: Tensor) -> Tensor:
    """Cross entropy of the first entry, with a square: its Λ is nowhere zero."""
    logits = outputs.double()
    return (logits.logsumexp(-1) - logits[..., 0]).mean() + 0.1 * logits.square().mean()


def working(model: nn.Module) -> Call:
    """The first call that the model takes; else the reasons why not."""
    known = set(inspect.signature(model.forward).parameters)
    reasons: dict[str, str] = {}
    for call in calls(model):
        if not known.issuperset(call):
            continue
        try:
            with evaluation(model, stay_double=True):
                found = read(model(**call))
        except Exception as error:  # whatever the family's code does with an input
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            reasons.setdefault(told, "+".join(call))
            continue
        if found.requires_grad and bool(torch.isfinite(loss(found))):
            return call
        reasons.setdefault("no finite loss that depends on a parameter", "+".join(call))
    raise LookupError("; ".join(f"{call}: {why}" for why, call in list(reasons.items())[:3]))


def runnable(family: str) -> tuple[nn.Module, Call]:
    """The family's tiny model and a call of it; else why the usual sizes give none."""
    first: Exception | None = None
    for options in OPTIONS:
        try:
            model = tiny_model(family, **options).double()
            return model, working(model)
        except StopIteration:
            raise LookupError("no model class with a head of text, images or sound") from None
        except Exception as error:  # whatever the family's code does with these sizes
            first = first or error
    assert first is not None
    raise LookupError(" ".join(f"{first}".split())[:300])


# --- the comparison -------------------------------------------------------------------------------


def double_backward(
    model: nn.Module, call: Call, named: dict[str, Tensor], v: list[Tensor]
) -> tuple[list[Tensor], ...]:
    """H v, H_o v, H_f v and the gradient, by autograd alone."""
    leaves = list(named.values())

    def grad(outputs: Any, inputs: Any, weights: Any = None, **options: Any) -> list[Tensor]:
        found = torch.autograd.grad(
            outputs, inputs, weights, allow_unused=True, retain_graph=True, **options
        )
        return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]

    def along(gradients: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        moving = [(g, d) for g, d in zip(gradients, v, strict=True) if g.requires_grad]
        if not moving:
            return [torch.zeros_like(i) for i in inputs]
        return grad([g for g, _ in moving], inputs, [d for _, d in moving])

    z = read(model(**call))
    inner = z.detach().requires_grad_(True)
    value = loss(inner)
    (slope,) = grad(value, [inner], create_graph=True)
    fixed = slope.detach().requires_grad_(True)
    gradient = grad(z, leaves, fixed, create_graph=True)  # Jᵀ u
    functional = along(gradient, leaves)
    (moved,) = along(gradient, [fixed])  # J v
    (curved,) = grad(slope, [inner], moved)
    outer = grad(z, leaves, curved)
    total = [o + f for o, f in zip(outer, functional, strict=True)]
    return total, outer, functional, [g.detach() for g in gradient]


def compared(family: str) -> Row:
    start = time.process_time()
    model, call = runnable(family)
    name = type(model).__name__
    draw = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        if parameter.is_floating_point():  # no weight is zero, and no two experts are equal
            noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=0.02)
    model.train().eval()  # which lets go of tables that were made of the weights before
    inputs = " + ".join(call)
    named = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    draw = torch.Generator().manual_seed(2)
    v = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in named.values()]
    names = list(named)
    common = {"family": family, "model": name, "inputs": inputs}
    with evaluation(model, stay_double=True):
        written: Record | None = None
        try:
            written = record(model, named, lambda: read(model(**call)), loss)
            tape = Tape(written)
            columns = {n: d.unsqueeze(0) for n, d in zip(names, v, strict=True)}
            outer, functional = tape.parts(columns, names)
            mine = [tape.hessian(columns, names), outer, functional]
            mine.append([_column(tape.gradient.get(n)) for n in names])
        except (DifferentiationError, NoGradientPath) as error:
            return Row(verdict="refused", why=str(error), **common)
        model.train().eval()  # nor keeps what the record put there
        exact = double_backward(model, call, named, v)
    errors = tuple(_error(m, e) for m, e in zip(mine, exact, strict=True))
    single = any(value.dtype == torch.float32 for value in written.values if value.numel())
    replayed = single or _replays_elsewhere(model, call, named, written)
    bound = 1e-4 if single else 1e-10
    right = all(error <= bound for error in errors)  # NaN is not
    right = right and replayed
    return Row(
        verdict="exact" if right else "wrong",
        why="" if replayed else "replayed at other parameters, the record gives another loss",
        errors=errors,
        single=single,
        operations=len(written.nodes),
        by_autograd=tuple(sorted(set(tape.by_autograd))),
        stops=tuple(sorted(written.stops)),
        seconds=round(time.process_time() - start, 2),
        **common,
    )


def _column(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.unsqueeze(0)


def _error(mine: list[Tensor | None], exact: list[Tensor]) -> float:
    difference = [
        (e if m is None else m.squeeze(0).to(e.dtype) - e).flatten().double()
        for m, e in zip(mine, exact, strict=True)
    ]
    size = torch.cat([e.flatten().double() for e in exact]).norm()
    return float(torch.cat(difference).norm() / size.clamp(min=1e-12))


def _replays_elsewhere(
    model: nn.Module, call: Call, named: dict[str, Tensor], written: Record
) -> bool:
    """Whether the record gives the model's own loss at other parameters, near enough for routing.

    Not asked of a record with stops, whose constants are those of one point.
    """
    if written.stops:
        return True
    here = float(written.values[written.loss])
    own_values = {n: p.detach().clone() for n, p in named.items()}
    draw = torch.Generator().manual_seed(3)
    v = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in named.items()}
    with evaluation(model, stay_double=True), torch.no_grad():
        for step in (1e-3, 1e-5, 1e-7):
            for n, p in named.items():
                p.copy_(own_values[n] + step * v[n])
            own = float(loss(read(model(**call))))
            replayed = float(written.replayed({n: p.detach() for n, p in named.items()}))
            if abs(own - replayed) <= 1e-5 * abs(own - here) + 1e-13 * abs(own):
                return True
    return False


# --- every family, each in a process of its own ---------------------------------------------------


def _child(family: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(None):
            row = compared(family)
    except LookupError as error:
        row = Row(family, "absent", why=str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "curvatlas/tape" in f.filename]
        place = f" [{Path(ours[-1].filename).name}:{ours[-1].lineno}]" if ours else ""
        compared_ = any(f.name in ("record", "double_backward") for f in frames)
        row = Row(family, "broken" if compared_ or ours else "absent", why=text + place)
        if isinstance(error, MemoryError) or "allocate memory" in text:
            row = Row(family, "late", why=f"over {MEMORY >> 30} GB of memory")
    pipe.send(row)


def examined(family: str) -> Row:
    """A family in a forked process, with limits of time and memory."""
    gc.collect()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = f"over {SECONDS} s of processor time" if late else "the process died"
        return Row(family, "late" if late else "broken", why=why)
    finally:
        process.kill()
        process.join()


# --- the page -------------------------------------------------------------------------------------


def kept() -> dict[str, Row]:
    """The rows that were kept, by family."""
    rows = json.loads(KEPT.read_text(encoding="utf-8"))
    tuples = ("errors", "by_autograd", "stops")
    return {
        name: Row(**{k: tuple(v) if k in tuples else v for k, v in row.items()})
        for name, row in rows.items()
    }


def keep(rows: dict[str, Row]) -> None:
    """Write rows to the file, what says nothing left out."""
    brief = {
        name: {k: v for k, v in asdict(row).items() if v or k in ("family", "verdict")}
        for name, row in sorted(rows.items())
    }
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in brief.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


INTRODUCTION = """\
# Hugging Face families

<!-- made by scripts/family_table.py --page: do not edit -->

Second derivatives by the tape against plain double backward in float64, for the tiny random model
of every Hugging Face model type that can be built and called here with made-up text, images or
sound. One random direction, relative errors; every weight is moved a little, so that none is zero.
*Exact*: within 1e-10 for H v, H_o v, H_f v and the gradient, and the record replayed at other
parameters gives the model's own loss there. Of a family with float32 inside: within 1e-4, and not
replayed. *Late*: more than the seconds or the memory that a family gets.

**{counts}.**{single}

*By autograd*: operations without a fast rule, differentiated one by one. *Stops*: modules in which
the model itself stops the derivative (`detach`, `no_grad`).

{exact}

## The others

{others}

{absent} more model types have no model class of these kinds, or none that runs here with the sizes
and inputs that the script knows.
"""
HEAD = ("family", "model", "inputs", "H v", "H_o v", "H_f v", "operations", "by autograd", "stops")


def page(rows: dict[str, Row]) -> str:
    """docs/families.md."""
    counts = Counter(row.verdict for row in rows.values() if row.verdict != "absent")
    exact = [row for row in rows.values() if row.verdict == "exact"]
    others = [row for row in rows.values() if row.verdict not in ("exact", "absent")]
    single = ", ".join(row.family for row in exact if row.single)
    cells = [
        (
            row.family,
            row.model,
            row.inputs,
            *(f"{error:.0e}" for error in row.errors[:3]),
            str(row.operations),
            ", ".join(name.removeprefix("aten.") for name in row.by_autograd),
            ", ".join(row.stops),
        )
        for row in exact
    ]
    reasons = [(row.family, row.verdict, row.why) for row in others]
    return INTRODUCTION.format(
        counts=", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
        single=f" In float32 inside: {single}." if single else "",
        exact="\n".join(table(HEAD, cells)),
        others="\n".join(table(("family", "", "why"), reasons)),
        absent=sum(row.verdict == "absent" for row in rows.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--page", action="store_true", help="write the page from what was kept")
    parser.add_argument("--traceback", action="store_true", help="in this process, errors shown")
    arguments = parser.parse_args()
    families = arguments.families or sorted(CONFIG_MAPPING)
    rows = kept() if KEPT.exists() else {}
    if not arguments.traceback and not arguments.page:
        for family in ("gpt2", "vit", "wav2vec2"):  # what all import, before the forks
            compared(family)
    for family in () if arguments.page else families:
        row = compared(family) if arguments.traceback else examined(family)
        shown = " ".join(f"{error:.0e}" for error in row.errors)
        print(f"{row.verdict:8} {family:28} {row.inputs:30} {shown} {row.why}", flush=True)
        rows[family] = row
        if not arguments.families:
            keep(rows)
    if arguments.page or not arguments.families:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
