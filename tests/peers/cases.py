"""The table: every case of the peers' suites that was carried over, with its verdict.

Facts carry over, code does not: each case is written anew against this library (test_<peer>.py).
Left out are tests of a peer's own machinery that say nothing of a result: hooks and traced graphs,
kernels that replace other kernels, vector arithmetic, moving batches to a device, the distribution
of probes, a second implementation of the same estimator, downloads, and tests that need a GPU;
several processes and memory have tests of their own here (tests/distributed, test_memory.py).
"""

from __future__ import annotations

from itertools import product

from peers.table import Group

# --- curvlinops -----------------------------------------------------------------------------------

SOLVABLE = (
    "cross-entropy, mean",
    "cross-entropy, sum",
    "BCE of one output, mean",
    "BCE of two outputs, mean",
    "BCE of two outputs, sum",
    "MSE, mean",
    "MSE, sum",
    "a dict as input, cross-entropy",
    "a dict as input, BCE",
    "a dict as input, MSE",
)
PROBLEMS = (
    *SOLVABLE,
    "sequences, cross-entropy, mean",
    "sequences, cross-entropy, sum",
    "sequences, BCE, mean",
    "sequences, BCE, sum",
    "sequences, MSE, mean",
    "sequences, MSE, sum",
    "a function of parameters, MSE",
)
LOSS_SHAPES = tuple(
    f"{loss}, {reduction}, outputs {shape}"
    for loss, reduction, shape in product(
        ("cross-entropy", "MSE", "BCE"), ("mean", "sum"), ("(3,)", "(3, 4)", "(3, 2, 5)")
    )
)


def _budgets(*counts: int) -> tuple[str, ...]:
    return tuple(f"{n} products" for n in counts)


CURVLINOPS = [
    Group("curvlinops", "Hessian", "test_hessian.py", "Hessian(problem)", PROBLEMS),
    Group("curvlinops", "Gauss-Newton matrix", "test_ggn.py", "GaussNewton(problem)", PROBLEMS),
    Group(
        "curvlinops",
        "sampled Gauss-Newton matrix, in expectation",
        "test_ggn.py (mc_expectation)",
        'Fisher(problem, kind="mc", samples=…)',
        [f"{p}; {how}" for p, how in product(PROBLEMS, ("many samples", "mean over seeds"))],
    ),
    Group(
        "curvlinops",
        "empirical Fisher",
        "test_gradient_moments.py",
        'Fisher(problem, kind="empirical")',
        PROBLEMS,
        note="(1/N) Σ g gᵀ of the targets' own losses; where a mean runs over outputs too, theirs "
        "is larger by their number",
    ),
    Group("curvlinops", "Jacobian", "test_jacobian.py", "Jacobian(problem)", PROBLEMS),
    Group(
        "curvlinops", "Jacobian, transposed", "test_jacobian.py", "Jacobian(problem).T", PROBLEMS
    ),
    Group(
        "curvlinops",
        "diagonal of the Gauss-Newton matrix",
        "test_ggn_diagonal.py",
        "diagonal(GaussNewton(problem))",
        PROBLEMS,
    ),
    Group(
        "curvlinops",
        "gradient and loss",
        "examples/test___init__.py",
        "problem.gradient(), problem.value()",
        PROBLEMS,
    ),
    Group(
        "curvlinops",
        "submatrices by index",
        "test_submatrix.py",
        "op[rows, columns]",
        [
            f"{p}; {op}; {rows}"
            for p, op, rows in product(
                PROBLEMS,
                ("Hessian", "GaussNewton", "Fisher"),
                ("even × even", "even × odd", "odd × every third"),
            )
        ],
    ),
    Group(
        "curvlinops",
        "indices that cannot be",
        "test_submatrix.py",
        "op[rows, columns]",
        [
            "floats as rows",
            "floats as columns",
            "a row twice",
            "a column twice",
            "a row out of bounds",
            "a column out of bounds",
        ],
        note="TypeError or IndexError; an entry asked for twice is there twice, theirs refuses",
    ),
    Group(
        "curvlinops",
        "the Hessian of a loss at the outputs",
        "test_ggn_utils.py (loss_hessian_matrix_sqrt)",
        "GaussNewton(problem)",
        LOSS_SHAPES,
        note="of a model whose outputs are its parameters",
    ),
    Group(
        "curvlinops",
        "sampled slopes of a loss have its Hessian as their second moment",
        "test_ggn_utils.py (grad_output_sampler)",
        'Fisher(problem, kind="mc", samples=…)',
        LOSS_SHAPES,
    ),
    Group(
        "curvlinops",
        "vectors and matrices in every form come back in theirs",
        "test__torch_base.py (preserve_input_format)",
        "op @ v, op @ V, op @ [tensors], op @ [tensors with K columns]",
        ["a vector", "a matrix", "a list of tensors", "a list of tensors with columns"],
    ),
    Group(
        "curvlinops",
        "inputs that do not fit are refused",
        "test__torch_base.py (input and output formatting)",
        "op @ v",
        [
            "a vector that is too short",
            "a matrix that is too short",
            "a tensor of another shape",
            "different numbers of columns",
            "too few tensors",
            "numbers in a list",
        ],
    ),
    Group(
        "curvlinops",
        "operators without entries",
        "test__torch_base.py (empty shapes)",
        "eigenpairs(op)",
        ["no rows and columns", "no rows", "no columns"],
    ),
    Group(
        "curvlinops",
        "a dict as input needs no word on the batch size",
        "test__torch_base.py (MutableMapping)",
        "Problem(model, loss, [(mapping, targets)])",
        ["dict", "UserDict"],
        note="theirs refuses without batch_size_fn",
    ),
    Group(
        "curvlinops",
        "randomness is not averaged over in silence",
        "test__torch_base.py (check_deterministic)",
        "Hessian(problem)",
        ["dropout", "batch normalisation", "a shuffling loader that drops its last batch"],
        note="dropout and batch statistics are refused, a loader that shuffles is read once",
    ),
    Group(
        "curvlinops",
        "batches that change from pass to pass",
        "test__torch_base.py (check_deterministic_batch)",
        "Hessian(problem)",
        ["permuted samples"],
        note="the batches of the first pass are kept; theirs refuses",
    ),
    Group(
        "curvlinops",
        "sums of operators",
        "test__torch_base.py",
        "A + B, A - B",
        ["A + B", "A − B"],
    ),
    Group(
        "curvlinops",
        "multiples of operators",
        "test__torch_base.py",
        "c * A, A * c, A / c",
        ["c · A", "A · c", "A / c"],
    ),
    Group(
        "curvlinops",
        "chains of operators",
        "test__torch_base.py",
        "A @ B @ C",
        ["three factors", "another dtype is refused", "another shape is refused"],
    ),
    Group(
        "curvlinops",
        "diagonal operators",
        "test_diag.py",
        "DiagonalOperator, inverse(…)",
        ["products", "sum", "difference", "c · D", "D · c", "D / c", "D @ E", "damped inverse"],
    ),
    Group(
        "curvlinops",
        "block-diagonal operators",
        "test_blockdiagonal.py",
        "BlockDiagonalOperator",
        [
            "rectangular blocks",
            "square blocks",
            "trace",
            "determinant",
            "log-determinant",
            "Frobenius norm",
            "a rectangle has no trace",
            "a rectangle has no determinant",
        ],
    ),
    Group(
        "curvlinops",
        "Kronecker products",
        "test_kronecker.py",
        "KroneckerOperator, inverse(…)",
        [
            "rectangular factors",
            "square factors",
            "trace",
            "determinant",
            "log-determinant",
            "Frobenius norm",
            "a rectangle has no trace",
            "a rectangle has no determinant",
            "damped inverse",
            "damped by factor",
        ],
    ),
    Group(
        "curvlinops",
        "operators from eigenpairs",
        "test_eigh.py",
        "U @ DiagonalOperator(values) @ U.T",
        ["products", "trace", "determinant", "log-determinant", "Frobenius norm", "damped inverse"],
    ),
    Group(
        "curvlinops",
        "eigenpairs that do not fit together",
        "test_eigh.py",
        "MatrixOperator(vectors) @ DiagonalOperator(values)",
        ["values in two axes", "vectors in one axis", "vectors not square", "too many values"],
    ),
    Group(
        "curvlinops",
        "the damped inverse of the Gauss-Newton matrix",
        "test_inverse.py",
        "inverse(GaussNewton(problem), damping=…, method=…, preconditioner=…)",
        [
            f"{p}; {how}"
            for p, how in product(
                SOLVABLE, ("conjugate gradients", "Jacobi preconditioner", "LSMR")
            )
        ],
    ),
    Group(
        "curvlinops",
        "inverses by series",
        "test_inverse.py (Neumann)",
        "inverse(A, preconditioner=…)",
        [
            "a matrix whose series converges",
            "a matrix whose series diverges",
            "scaled identity as preconditioner",
            "Jacobi preconditioner",
        ],
        {
            "Gauss-Seidel preconditioner": "it is not symmetric, and conjugate gradients need one "
            "that is; inverse(method='lsmr') solves the system without it",
            "twenty terms of the series": "an unfinished series is no inverse: a product that does "
            "not reach its tolerance raises ConvergenceError",
        },
    ),
    Group(
        "curvlinops",
        "KFAC as preconditioner where it is exact",
        "test_inverse.py",
        "solve(GaussNewton(problem), b, preconditioner=KFAC(problem).inverse(damping))",
        ["KFAC", "EKFAC", "the dense inverse"],
    ),
    Group(
        "curvlinops",
        "trace, Hutchinson",
        "trace/test_hutchinson.py",
        "trace(op, max_products=…)",
        _budgets(3, 6),
    ),
    Group(
        "curvlinops",
        "trace, Hutch++",
        "trace/test_meyer2020hutch.py",
        "trace(op, max_products=…)",
        _budgets(3, 6),
    ),
    Group(
        "curvlinops",
        "trace, XTrace",
        "trace/test_epperly2024xtrace.py",
        "trace(op, max_products=…)",
        _budgets(6, 8),
    ),
    Group(
        "curvlinops",
        "diagonal, Hutchinson",
        "diagonal/test_hutchinson.py",
        "diagonal(op, max_products=…)",
        _budgets(4, 10),
    ),
    Group(
        "curvlinops",
        "diagonal, XDiag",
        "diagonal/test_epperly2024xtrace.py",
        "diagonal(op, max_products=…)",
        _budgets(4, 10),
    ),
    Group(
        "curvlinops",
        "squared Frobenius norm, Hutchinson",
        "norm/test_hutchinson.py",
        "frobenius_norm(op, max_products=…)",
        _budgets(2, 8),
    ),
    Group(
        "curvlinops",
        "the ends of a spectrum",
        "papyan2020traces/test_spectrum.py",
        "eigenpairs(op, which=…), spectral_norm(op)",
        ["smallest", "largest", "largest magnitude"],
        {
            "ends that the caller gives": "an interval of the caller's is not trusted: every "
            "estimator finds the ends itself and says between which values the spectrum lies"
        },
    ),
    Group(
        "curvlinops",
        "spectral density of a known matrix",
        "papyan2020traces/test_spectrum.py",
        "spectral_density(op)",
        ["mass of the bulk and place of the outliers"],
    ),
    Group(
        "curvlinops",
        "what a model may be",
        "test__empirical_risk.py",
        "Problem(model, loss, data, parameters=…)",
        [
            "a string is refused",
            "a module with a mapping of its parameters",
            "a function with a mapping of its parameters",
            "a module with a list of its parameters (theirs refuses)",
        ],
    ),
    Group(
        "curvlinops",
        "models that mix their batch",
        "test__checks.py",
        "Hessian(problem)",
        ["a mean over the batch"],
        note="the batch stays together, whatever the memory budget; theirs refuses",
    ),
]

KRONECKER = ("KFAC", "EKFAC")
REDUCTIONS = ("mean", "sum")
KINDS = ("exact", "mc", "empirical")
_LOSSES = ("MSE", "cross-entropy", "BCE")


def _variants(*parts: tuple[str, ...]) -> list[str]:
    return ["; ".join(chosen) for chosen in product(*parts)]


KFAC = [
    Group(
        "curvlinops",
        "KFAC of deep linear regression is exact",
        "test_kfac.py, test_ekfac.py (type2)",
        "KFAC(problem), EKFAC(problem)",
        _variants(
            KRONECKER,
            ("one output", "three outputs", "a dict as input"),
            REDUCTIONS,
            ("all", "no weights", "no biases"),
        ),
        {
            "weight and bias as blocks apart": "the bias is a column of its layer's matrix; the "
            "blocks apart are KFAC(problem)[name]"
        },
    ),
    Group(
        "curvlinops",
        "KFAC of shared weights is exact",
        "test_kfac.py, test_ekfac.py (weight_sharing)",
        "KFAC(problem, approximation=…)",
        _variants(
            KRONECKER,
            ("linear over positions", "convolution"),
            ("expand", "reduce"),
            REDUCTIONS,
            ("all", "no weights", "no biases"),
        ),
    ),
    Group(
        "curvlinops",
        "KFAC of tied weights is exact for one sample",
        "test_kfac.py, test_ekfac.py (weight_tying)",
        "KFAC(problem)",
        _variants(KRONECKER, REDUCTIONS, ("without bias", "with bias")),
    ),
    Group(
        "curvlinops",
        "KFAC of tied weights with a bias in one place",
        "test_kfac.py (mixed_bias)",
        "KFAC(problem)",
        _variants(REDUCTIONS),
    ),
    Group(
        "curvlinops",
        "KFAC of tied weights with two biases",
        "test_kfac.py (conflicting_biases)",
        "KFAC(problem)",
        _variants(REDUCTIONS),
        note="a block each for the weight and for the biases; theirs refuses",
    ),
    Group(
        "curvlinops",
        "KFAC of one sample is exact",
        "test_kfac.py, test_ekfac.py (one_datum)",
        "KFAC(problem, kind=…)",
        _variants(KRONECKER, KINDS, ("cross-entropy", "BCE"), REDUCTIONS),
    ),
    Group(
        "curvlinops",
        "sampled KFAC approaches the exact one",
        "test_kfac.py, test_ekfac.py (mc)",
        'KFAC(problem, kind="mc", samples=…)',
        _variants(KRONECKER, ("one output", "three outputs", "a dict as input"), REDUCTIONS),
    ),
    Group(
        "curvlinops",
        "sampled KFAC of shared weights approaches the exact one",
        "test_kfac.py, test_ekfac.py (mc_weight_sharing)",
        'KFAC(problem, approximation=…, kind="mc", samples=…)',
        _variants(
            KRONECKER, ("linear over positions", "convolution"), ("expand", "reduce"), REDUCTIONS
        ),
    ),
    Group(
        "curvlinops",
        "KFAC with activations in place",
        "test_kfac.py, test_ekfac.py",
        "KFAC(problem)",
        list(KRONECKER),
    ),
    Group(
        "curvlinops",
        "KFAC of outputs with more axes is that of flat ones",
        "test_kfac.py, test_ekfac.py (multi_dim_output)",
        "KFAC(problem, kind=…)",
        _variants(KRONECKER, KINDS, _LOSSES, REDUCTIONS),
    ),
    Group(
        "curvlinops",
        "KFAC of a sum is that of the mean, scaled",
        "test_kfac.py, test_ekfac.py (expand_setting_scaling)",
        "KFAC(problem, kind=…)",
        _variants(KRONECKER, KINDS, _LOSSES),
        note="the empirical kind follows the slopes of the losses, as the empirical Fisher does",
    ),
    Group(
        "curvlinops",
        "trace, norm and determinants of KFAC",
        "test_kfac.py, test_ekfac.py (property)",
        "trace(KFAC(problem)), …",
        _variants(PROBLEMS, ("trace", "Frobenius norm", "determinant", "log-determinant")),
    ),
    Group(
        "curvlinops",
        "trace, norm and determinants of EKFAC",
        "test_ekfac.py (property)",
        "trace(EKFAC(problem)), …",
        _variants(SOLVABLE, ("trace", "Frobenius norm", "determinant", "log-determinant")),
    ),
    Group(
        "curvlinops",
        "KFAC from the forward pass alone",
        "test_kfac.py (forward_only)",
        "KFAC(problem)",
        refused={
            "the slopes as the identity": "G = I is no curvature of the loss; "
            'kind is "exact", "mc" or "empirical"'
        },
    ),
    Group(
        "curvlinops",
        "KFAC leaves gradients alone",
        "test_kfac.py, test_ekfac.py",
        "KFAC(problem)",
        list(KRONECKER),
    ),
    Group(
        "curvlinops",
        "KFAC saved and loaded",
        "test_kfac.py, test_ekfac.py (torch_save_load)",
        "torch.save, torch.load",
        refused=dict.fromkeys(
            KRONECKER,
            "a pickle runs code when it is loaded: an operator is made anew, results save",
        ),
    ),
    Group(
        "curvlinops",
        "options of KFAC as strings",
        "test_kfac.py (string_in_enum)",
        "KFAC(problem, approximation=…, kind=…)",
        _variants(("expand", "reduce"), KINDS),
    ),
    Group(
        "curvlinops",
        "the damped inverse of KFAC",
        "test_kfac.py, test_ekfac.py (inverse)",
        "KFAC(problem).inverse(damping)",
        [*_variants(("KFAC",), PROBLEMS), *_variants(("EKFAC",), SOLVABLE)],
        {
            "damping by factor": "it is another matrix: inverse(damping) is (A + damping·I)⁻¹",
            "damping by a rule of thumb": "it is another matrix: inverse(damping) is "
            "(A + damping·I)⁻¹",
        },
    ),
    Group(
        "curvlinops",
        "KFAC of flattened inputs in batches of different sizes",
        "test_kfac.py, test_ekfac.py (flatten)",
        "KFAC(problem)",
        list(KRONECKER),
    ),
    Group(
        "curvlinops",
        "KFAC of a function of parameters",
        "test_kfac.py, test_ekfac.py (callable_model_func)",
        "KFAC(problem)",
        list(KRONECKER),
    ),
    Group(
        "curvlinops",
        "parameters that no layer explains",
        "test_kfac.py (unsupported_layer_params)",
        "KFAC(problem)",
        ["they are named, and have no block"],
        note="a warning; theirs refuses",
    ),
    Group(
        "curvlinops",
        "EKFAC is nearer to the exact blocks than KFAC",
        "test_ekfac.py (closer_to_exact)",
        "EKFAC(problem), KFAC(problem)",
        [
            *_variants(SOLVABLE, ("exact", "empirical"), ("expand", "reduce")),
            *_variants(("a convolutional network",), KINDS, ("expand", "reduce")),
        ],
    ),
]

# --- hessian-eigenthings --------------------------------------------------------------------------

LINEAR_MODELS = ("linear regression", "binary logistic regression", "softmax regression")

EIGENTHINGS = [
    Group(
        "hessian-eigenthings",
        "closed forms of linear models",
        "test_analytic_hessian.py",
        "Hessian(problem), GaussNewton(problem)",
        [
            f"{model}; {op}"
            for model, op in product(LINEAR_MODELS, ("Hessian", "GaussNewton", "both agree"))
        ],
    ),
    Group(
        "hessian-eigenthings",
        "batch statistics",
        "test_batching.py, test_hessian_operator.py",
        "Hessian(problem)",
        [
            "BatchNorm1d in training is refused",
            "BatchNorm2d in training is refused",
            "the layer is named",
            "BatchNorm1d in evaluation",
            "LayerNorm",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "the Hessian of an MLP",
        "test_hessian_operator.py",
        "Hessian(problem, …)",
        [
            "products",
            "over batches",
            "a filter gives the size of the part",
            "a filter gives that block",
            "a vector of another length is refused",
        ],
        {
            "another batch at every product": "an operator is one matrix: products of different "
            "batches belong to none; per_batch() gives the batches' own operators"
        },
    ),
    Group(
        "hessian-eigenthings",
        "products by finite differences",
        "test_hessian_finite_difference.py",
        "Hessian(problem)",
        ["parameters are as before a product", "parameters are as before a product that fails"],
        {
            "differences in place of derivatives": "products are exact; differences serve only to "
            "check custom autograd functions",
            "a step for every dtype": "there is no step to choose",
        },
    ),
    Group(
        "hessian-eigenthings",
        "the Gauss-Newton matrix of an MLP",
        "test_ggn_operator.py, test_ggn_matvec.py",
        "GaussNewton(problem)",
        [
            "cross-entropy",
            "MSE",
            "over batches",
            "no negative curvature",
            "a vector of another length is refused",
            "a loss without a closed form (theirs refuses)",
            "float32",
            "vectors of length 1e-12",
            "vectors of length 1e-6",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "the empirical Fisher of an MLP",
        "test_fisher_operator.py",
        'Fisher(problem, kind="empirical")',
        ["products", "no negative curvature", "over batches", "another length is refused"],
    ),
    Group(
        "hessian-eigenthings",
        "eigenpairs of an MLP's Hessian",
        "test_eigendecomp_on_hessian.py",
        'eigenpairs(Hessian(problem), which="magnitude")',
        ["values", "vectors solve the equation", "values, in place of power iteration"],
    ),
    Group(
        "hessian-eigenthings",
        "eigenpairs of random matrices, Lanczos",
        "test_lanczos_random_matrix.py",
        "eigenpairs(op, k=…, which=…)",
        [
            "largest magnitude",
            "largest",
            "smallest",
            "vectors solve the equation",
            "vectors are orthonormal",
            "residuals are numbers",
            "the budget is kept",
            "a seed repeats the result",
            "k = 0 is refused",
            "k beyond the size is refused",
            "a budget beyond the size (theirs refuses)",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "eigenpairs of random matrices, power iteration",
        "test_power_iteration_random_matrix.py",
        "eigenpairs(op, k=…)",
        [
            "the largest value",
            "its vector solves the equation",
            "five values",
            "vectors are orthogonal",
            "residuals are not negative",
            "k = 0 is refused",
            "k beyond the size is refused",
            "a seed repeats the result",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "which parameters vary",
        "test_param_utils.py",
        "Problem(…, parameters=…), problem.layout",
        [
            "all by default",
            "a glob",
            "several globs",
            "a regular expression",
            "frozen ones stay out",
            "an empty selection is refused",
            "the total size",
            "to a vector and back",
            "a vector of another length is refused",
            "a vector in two axes is refused",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "losses",
        "test_loss_fns.py",
        "Problem(model, loss, data)",
        [
            "a loss is a number",
            "a Hessian from a loss function",
            "a Gauss-Newton matrix from a loss function",
            "a Fisher from a loss function",
            "a Hugging Face language model's own loss",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "spectral density",
        "test_spectral_density.py",
        "spectral_density(op)",
        [
            "it integrates to one",
            "two clusters",
            "an even spectrum looks even",
            "weights of the nodes sum to one",
            "a seed repeats the result",
            "more steps than entries (theirs refuses)",
            "a budget of zero is refused",
            "an MLP's Hessian lies within",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "trace",
        "test_trace.py",
        "trace(op)",
        [
            "within the interval",
            "within five percent on 99 products",
            "closer than Hutchinson at equal cost",
            "of a diagonal operator",
            "a budget of zero is refused",
            "of an MLP's Hessian",
        ],
    ),
    Group(
        "hessian-eigenthings",
        "the Hessian of cross-entropy at the logits",
        "test_fused_ce_hvp.py",
        "GaussNewton(problem)",
        [
            "a vocabulary of 7",
            "a vocabulary of 100",
            "a vocabulary of 50257",
            "a vocabulary of 130000",
            "the dense matrix",
            "one valid token among many",
            "a logit of 50",
            "all logits equal",
        ],
        {
            "no valid token": "a mean over no targets has no curvature; theirs gives zero",
            "float16": "curvature needs float32 or float64",
            "bfloat16": "curvature needs float32 or float64",
        },
    ),
]

# --- PyHessian: what its example and its tutorial show --------------------------------------------

_COMPLEX = "complex operators are not taken: curvature is real"

PYHESSIAN = [
    Group(
        "PyHessian",
        "top eigenvalues of a network",
        "pyhessian/hessian.py (eigenvalues), tutorial",
        'eigenpairs(Hessian(problem), k=…, which="magnitude")',
        [
            "one batch, the first",
            "one batch, the first two",
            "a list of batches",
            "batches of different sizes",
            "vectors are orthonormal",
            "a network with batch normalisation",
            "a network wrapped in DataParallel",
        ],
    ),
    Group(
        "PyHessian",
        "trace of a network's Hessian",
        "pyhessian/hessian.py (trace), tutorial",
        "trace(Hessian(problem))",
        ["one batch", "a list of batches", "batches of different sizes"],
    ),
    Group(
        "PyHessian",
        "eigenvalue density of a network's Hessian",
        "pyhessian/hessian.py (density), density_plot.py",
        "spectral_density(Hessian(problem))",
        [
            "one batch",
            "a list of batches",
            "weights sum to one",
            "moments are the traces of the powers",
            "a figure of it",
        ],
    ),
    Group(
        "PyHessian",
        "a matrix that is only multiplied",
        "tutorial",
        "eigenpairs(op), trace(op), diagonal(op)",
        ["top eigenvalue", "trace", "diagonal"],
    ),
    Group(
        "PyHessian",
        "the loss along directions",
        "tutorial",
        "½ vᵀHv of Hessian(problem)",
        ["top eigenvector", "a random direction", "the gradient"],
    ),
    Group(
        "PyHessian",
        "data, or a loader, but not both",
        "pyhessian/hessian.py",
        "Problem(model, loss, data)",
        ["one batch", "a loader"],
        {"none at all": "there is nothing to differentiate"},
    ),
    Group(
        "PyHessian",
        "parameters that are frozen",
        "pyhessian/utils.py (get_params_grad)",
        "Problem(model, loss, data)",
        ["they are left out"],
    ),
]

# --- matfree --------------------------------------------------------------------------------------

SHAPES = ("tall", "wide", "square")

MATFREE = [
    Group(
        "matfree",
        "Lanczos decomposition",
        "test_decomp/test_tridiag_sym.py",
        "KrylovBasis(op, …)",
        [
            "all steps rebuild the matrix",
            "after 1 step",
            "after 5 steps",
            "after 11 steps",
            "a Hilbert matrix",
        ],
    ),
    Group(
        "matfree",
        "decompositions of what is not symmetric",
        "test_decomp/test_hessenberg.py, test_eig/test_eig_partial.py",
        "eigenpairs(op)",
        refused={
            "Hessenberg form": "curvature is symmetric, and so are the decompositions",
            "eigenvalues of a general matrix": "they may be complex: A @ A.T or the symmetric part "
            "have real ones",
        },
    ),
    Group(
        "matfree",
        "numbers of products",
        "test_decomp/test_consistency.py",
        "eigenpairs(op, max_products=…)",
        ["as many as entries", "half as many", "a negative number is refused", "more than entries"],
        {"none": "no product, no answer: max_products starts at 1"},
    ),
    Group(
        "matfree",
        "eigenpairs of a symmetric matrix",
        "test_eig/test_eigh_partial.py",
        "eigenpairs(op, k=…)",
        ["all of them", "four of eight", "two, as tensors of parameters"],
        {"none of them": "k starts at 1"},
    ),
    Group(
        "matfree",
        "singular values and vectors",
        "test_eig/test_svd_partial.py, test_decomp/test_bidiag.py",
        "eigenpairs(A.T @ A), spectral_norm(A)",
        [
            "all of a 10 × 3 matrix",
            "two of a 10 × 3 matrix",
            "four among 49 small ones",
            "a Hilbert matrix 15 × 15",
            "a Hilbert matrix 15 × 13",
            "a Hilbert matrix 13 × 15",
        ],
    ),
    Group(
        "matfree",
        "f(A) v",
        "test_funm/test_funm_lanczos_sym.py, test_funm_chebyshev.py, test_funm_arnoldi.py",
        "matrix_function(op, v, f)",
        ["sine, Lanczos", "sine, spectrum within ±1"],
        {"exponential of a general matrix": "f(A) v is for symmetric operators"},
    ),
    Group(
        "matfree",
        "log-determinants and vᵀ log(A) v",
        "test_funm/test_monte_carlo_funm_*_logdet.py, test_bounds/test_bai_golub.py",
        "log_determinant(op), quadratic_form(op, v, function=np.log)",
        [
            "a symmetric matrix",
            "a product AᵀA",
            "vᵀ log(A) v",
            "vᵀ log(AᵀA) v",
            "between the bounds of its moments",
        ],
    ),
    Group(
        "matfree",
        "Schatten norms",
        "test_funm/test_monte_carlo_funm_product_schatten_norm.py",
        "trace_function(A.T @ A, lambda x: x ** (p / 2))",
        [f"power {p}, seed {s}" for p, s in product((1, 2, 3), (1, 2, 3))],
    ),
    Group(
        "matfree",
        "partial Cholesky decompositions",
        "test_low_rank/",
        "cholesky_preconditioner(op, rank=…, damping=…)",
        [
            "full rank rebuilds the matrix",
            "the factor's shape",
            "better than columns in their order",
            "as a preconditioner it solves the damped system",
        ],
        {"without pivots": "columns in their order approximate worse at the same cost"},
    ),
    Group(
        "matfree",
        "least squares",
        "test_lstsq.py",
        "least_squares(op, b, damping=…, start=…)",
        [
            *(f"{shape}, {how}" for shape, how in product(SHAPES, ("from zero", "from a guess"))),
            *(f"{shape}, damped, {rank} rank" for shape, rank in product(SHAPES, ("full", "low"))),
            *(f"{shape}, as SciPy's LSMR" for shape in SHAPES),
            "a right-hand side of zeros",
        ],
    ),
    Group(
        "matfree",
        "trace, diagonal and Frobenius norm of a function's Jacobian",
        "test_stochtrace/test_monte_carlo/",
        "trace(op), diagonal(op), frobenius_norm(op)",
        [
            f"{what}, seed {s}"
            for what, s in product(("trace", "diagonal", "Frobenius norm", "both"), (1, 2, 3))
        ],
        {
            "trace, complex": _COMPLEX,
            "diagonal, complex": _COMPLEX,
            "Frobenius norm, complex": _COMPLEX,
        },
    ),
    Group(
        "matfree",
        "standard errors",
        "test_stochtrace/test_monte_carlo/test_estimator_mean_and_std.py",
        "trace(op).interval",
        ["the mean is the estimate", "intervals hold as often as they say"],
    ),
    Group(
        "matfree",
        "squared norms of rows and columns",
        "test_stochtrace/…rownorms_squared.py",
        "diagonal(A @ A.T), diagonal(A.T @ A)",
        ["rows, square", "rows, rectangular", "columns", "they sum to the squared Frobenius norm"],
    ),
    Group(
        "matfree",
        "traces and diagonals that few products settle",
        "test_stochtrace/test_leave_one_out/",
        "trace(op, max_products=…), diagonal(op, max_products=…)",
        [
            "trace, as many products as 10 entries",
            "trace, as many products as 21 entries",
            "diagonal, as many products as 10 entries",
            "diagonal, as many products as 21 entries",
            "trace, rank 10 of 50",
            "trace, rank 30 of 100",
            "trace, more products than entries",
            "diagonal, more products than entries",
            "trace, geometric decay",
            "diagonal, geometric decay",
            "trace, fifty equal values above the rest",
        ],
        note="of the last theirs is within 1e-5 on 120 products; ours within 2e-2 and says that it "
        "has not converged, because one Krylov space sees one copy of a repeated eigenvalue",
    ),
    Group(
        "matfree",
        "Nyström approximations",
        "test_stochtrace/test_leave_one_out/test_nystrom.py",
        "nystrom_preconditioner(op, rank=…)",
        [
            "positive semidefinite",
            "equal on its own columns",
            "exact beyond the operator's rank",
            "as many values as the smaller rank",
        ],
    ),
]

GROUPS: list[Group] = [*CURVLINOPS, *KFAC, *EIGENTHINGS, *PYHESSIAN, *MATFREE]
