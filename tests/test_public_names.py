"""The front door: names that load on first use, and that a type checker sees."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import curvatlas as ca

ROOT = Path(__file__).parent.parent

SCRIPT = """
import torch
from torch import Tensor, nn

import curvatlas as ca

layers: list[nn.Module] = [nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)]
model = nn.Sequential(*layers)
inputs, targets = torch.randn(8, 3), torch.randint(0, 2, (8,))
problem = ca.Problem(model, "cross_entropy", (inputs, targets))
roles = problem.anatomy.roles
hessian, outer = ca.Hessian(problem), ca.GaussNewton(problem)
product = hessian @ problem.gradient()
half = 0.5 * (outer + ca.FunctionalHessian(problem))
corner = hessian[:4, :4].dense()
pairs = ca.eigenpairs(half, k=3, which="both", tol=1e-4)
trace = ca.trace(ca.Fisher(problem, kind="mc"), rtol=0.05)
density = ca.spectral_density(outer, seed=1)
diagonal = ca.diagonal(hessian)
norm = ca.frobenius_norm(hessian)
solution = ca.solve(outer, product, damping=1e-2)
newton = ca.newton_step(hessian, problem.gradient(), radius=1.0)
atlas = ca.atlas(problem)
flow = ca.CurvaturePropagationAnalyzer(model).analyze_curvature_flow(inputs, targets)
dense = ca.TransformerBlockHessian(8, 16, 2).compute_block_hessian(inputs, inputs)
taylor = ca.TaylorExpansionAnalyzer.from_problem(problem).radius(accuracy=0.01)
conditioning = ca.ConvergenceDiagnostics(model).compute_effective_conditioning(inputs, targets)
snapshot = ca.Monitor(model, "cross_entropy", (inputs, targets), every=10).step()
pruned = ca.prune(model, "cross_entropy", (inputs, targets), sparsity=0.5)
run = ca.survey(problem, output="run", skip=["map"], time="5m")
"""
TYPES = {
    "roles": "tuple[str, ...]",
    "hessian": "Hessian",
    "product": "Tensor",
    "half": "LinearOperator",
    "corner": "Tensor",
    "pairs": "Eigenpairs",
    "pairs.values": "Tensor",
    "trace": "Estimate",
    "trace.interval": "tuple[float, float]",
    "density": "SpectralDensity",
    "density.plot()": "Figure",
    "diagonal": "DiagonalEstimate",
    "norm.value": "float",
    "solution": "Solution",
    "newton": "NewtonStep",
    "atlas": "Atlas",
    'atlas.frobenius["total"].values': "Tensor",
    "flow": "CurvatureFlow",
    "flow.sublayers": "tuple[FlowEntry, ...]",
    "dense": "BlockHessian",
    "dense.H_outer": "Tensor",
    "dense.plot()": "Figure",
    "taylor": "TrustRadius",
    "conditioning": "EffectiveConditioning",
    "snapshot": "Snapshot | None",
    "pruned": "Pruning",
    "run": "LoadedRun",
    "run.report": "Path",
    'run["model.subject"]': "Result",
    'run.result("model.total.eigenpairs", ca.Eigenpairs).values': "Tensor",
}


@pytest.mark.slow
def test_a_type_checker_sees_no_any_in_a_users_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    shown = "".join(f"reveal_type({expression})\n" for expression in TYPES)
    script.write_text(textwrap.dedent(SCRIPT) + shown)
    # The project's own options and cache: what ``make check`` has read of torch and of ours, 20 s
    # of processor time, need not be read again.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    own = text.partition("[tool.mypy]\n")[2].partition("[tool.pytest")[0]
    own = own.replace('files = ["src"]\n', "")
    assert "strict = true" in own
    strict = '[[tool.mypy.overrides]]\nmodule = "script"\ndisallow_any_expr = true\n'
    options = tmp_path / "pyproject.toml"
    options.write_text(f"[tool.mypy]\n{own}{strict}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(options),
         "--cache-dir", str(ROOT / ".mypy_cache"), str(script)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "error" not in done.stdout, done.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    # without the modules: curvatlas.spectra.estimate.Estimate → Estimate
    plain = [re.sub(r"[\w.]*\.(?=\w)", "", kind).replace("builtins.", "") for kind in revealed]
    assert plain == list(TYPES.values())


def _fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    assert (
        _fresh("import sys, curvatlas; print({'torch', 'numpy'} & set(sys.modules))") == "set()\n"
    )


def test_every_public_name_is_there_and_listed() -> None:
    for name in ca.__all__:
        assert getattr(ca, name) is not None, name
    assert set(ca.__all__) <= set(dir(ca))
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        ca.nothing_of_ours  # type: ignore[attr-defined]  # noqa: B018


def test_functions_stay_functions_after_every_module_was_imported() -> None:
    for module in pkgutil.walk_packages(ca.__path__, "curvatlas."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    functions = ("atlas", "diagonal", "eigenpairs", "prune", "solve", "survey", "trace")
    assert all(inspect.isfunction(getattr(ca, name)) for name in functions)


def test_the_old_name_of_closed_forms_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="curvatlas.blocks is now curvatlas.closed_form"):
        assert ca.blocks is ca.closed_form  # type: ignore[attr-defined]


def _functions(value: Any) -> Iterator[Callable[..., Any]]:
    """The function itself, or the public methods and properties of a class of ours."""
    if inspect.isfunction(value):
        yield value
    for owner in value.__mro__ if inspect.isclass(value) else ():
        for name, raw in vars(owner).items() if owner.__module__.startswith("curvatlas.") else ():
            function = getattr(raw, "__func__", raw)
            function = getattr(function, "fget", None) or getattr(function, "func", function)
            if not name.startswith("_") and inspect.isfunction(function):
                yield function


def test_every_result_that_a_public_function_returns_is_public() -> None:
    hidden = set()
    for name in ca.__all__:
        for function in _functions(getattr(ca, name)):
            returned = str(function.__annotations__.get("return", ""))
            for word in re.findall(r"[A-Z]\w+", returned):
                kind = function.__globals__.get(word)
                if inspect.isclass(kind) and issubclass(kind, ca.Result) and word not in ca.__all__:
                    hidden.add(f"{word}, returned by {function.__qualname__}")
    assert not hidden
